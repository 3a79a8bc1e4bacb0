"""Files by which the processes of a machine share one copy of the frozen weights.

The first process of a group makes the file, the others open it by the first one's descriptor. The system frees it with the last mapping.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch.distributed as dist

from rlx.offload.storage.arena import Pages, host_arena
from rlx.offload.storage.disk import DiskAllocation, DiskError, DiskTier, ExtentFile, StagingBuffers, usable
from rlx.offload.storage.offloader import CopyStreams
from rlx.offload.storage.ranges import MAX_CHUNK_BYTES, Extent


@contextmanager
def shared_memory(nbytes: int, group: dist.ProcessGroup) -> Iterator[int]:
    """Yield a descriptor of the same memory, which `/dev/shm` does not limit, in all processes of a group, which call this together."""

    def make() -> int:
        file = os.memfd_create("frozen weights")
        os.ftruncate(file, nbytes)
        return file

    with _shared(make, group) as file:
        yield file


class WeightFile:
    """A file on disk that holds frozen weights: mapped where they wait, read in chunks when they are fetched.

    The processes of a group share it; they call all methods together. If it cannot be made or has no room, the first process raises
    DiskError, the others OSError.
    """

    def __init__(
        self, directory: str | os.PathLike[str], copy_streams: CopyStreams, group: dist.ProcessGroup | None
    ) -> None:
        self._group = group
        self._is_first = group is None or dist.get_rank(group) == 0
        folder = Path(directory).expanduser()
        if group is None:
            os.close(self._make(folder))
        else:
            with _shared(lambda: self._make(folder), group) as descriptor:
                if not self._is_first:
                    self._file = ExtentFile(folder, os.dup(descriptor))
        arena = host_arena(copy_streams.device.type != "cpu")
        self._tier = DiskTier(self._file, StagingBuffers(arena, MAX_CHUNK_BYTES), warning=None)

    def allocate(self, nbytes: int) -> tuple[Pages, DiskAllocation]:
        """Return a mapping of new bytes of the file, and what reads them."""
        answer: list[object] = [None, None]
        fault: OSError | None = None
        if self._is_first:
            try:
                answer[0] = self._reserved(nbytes)
            except OSError as error:
                fault, answer[1] = error, str(error)
        if self._group is not None:
            dist.broadcast_object_list(answer, group_src=0, group=self._group)
        extent = cast(Extent | None, answer[0])
        if extent is None:
            raise fault or OSError(f"on the first process of this machine: {answer[1]}")
        pages = Pages(extent.length, False, self._file.descriptor, extent.start)
        return pages, DiskAllocation(self._tier, nbytes, [extent])

    def _make(self, folder: Path) -> int:
        with usable(folder):
            self._file = ExtentFile(folder)
        return os.dup(self._file.descriptor)

    def _reserved(self, nbytes: int) -> Extent:
        # The file only grows, so there is one free range, at its end.
        (extent,) = self._file.allocate(nbytes)
        # A write to a mapping of a disk that turns out to be full would kill the process.
        if os.fstat(self._file.descriptor).st_blocks * 512 < extent.start + extent.length:
            raise DiskError(
                errno.EOPNOTSUPP,
                f"layer offloading: this file system cannot reserve {nbytes} bytes for a file; choose another directory",
                self._file.directory,
            )
        return extent


@contextmanager
def _shared(make: Callable[[], int], group: dist.ProcessGroup) -> Iterator[int]:
    """Yield a descriptor of one file in all processes of a group; the first one has made it."""
    found: list[tuple[str, int] | None] = [None]
    file, is_first = -1, dist.get_rank(group) == 0
    try:
        fault: OSError | None = None
        if is_first:
            try:
                file = make()
                path = f"/proc/{os.getpid()}/fd/{file}"
                found[0] = path, os.O_RDWR | fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
            except OSError as error:
                fault = error
        dist.broadcast_object_list(found, group_src=0, group=group)
        if found[0] is None:
            raise fault or OSError("the first process of this machine could not create the shared file")
        if not is_first:
            file = os.open(*found[0])
        yield file
    finally:
        dist.barrier(group)  # the first one's descriptor stays until all have opened it
        if file >= 0:
            os.close(file)
