"""The disk tier: offloaded bytes in an unnamed file.

Note [reads and writes cannot wait for each other]
Bytes go to and from the disk in chunks, through page-locked staging buffers.
*Write.* Forward waits for a free staging buffer, queues the copy into it and hands it to a writer thread. The thread waits for the
copy, writes the chunk and frees the buffer.
*Read.* A reader thread waits until the chunks of its allocation are written. It then allocates a staging buffer, reads the chunk and
queues the copy to the device.
These waits make no circle. Writers wait for the device only. Readers wait for writers, and have threads and staging buffers of their
own. Forward and backward wait for both. No writer or reader takes a lock that is held during a wait.

Note [who may free an extent]
The owner of a disk allocation may die while writes and reads are queued or running. A queued task has a weak reference to the
allocation, a running one a strong one. So the last holder frees the extents in `DiskAllocation.__del__`. That takes no lock: it
appends them to a queue, which is emptied before the file hands out more. `held_bytes` drops earlier, at `free`.

Note [the file]
One per process and directory. It has no name, so that the system removes it with the process. It reserves the room of each growth before
anything is written: a full disk is noticed early. Reads and writes bypass the page cache if the file system allows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.offload.storage.arena import Block, HostArena, Pages, as_bytes, host_arena
from rlx.offload.storage.offloader import CopyStreams, FetchBuffer, PendingTasks
from rlx.offload.storage.ranges import (
    PAGE_ALIGN_BYTES,
    READER_THREADS,
    WRITE_BUFFERS,
    Extent,
    RangeAllocator,
    growth_bytes,
    page_aligned,
    staging_bytes,
)

logger = logging.getLogger("rlx.offload")


class StagingBuffers:
    """A fixed number of host buffers between the device and the disk, of `chunk_bytes` each and `nbytes` together."""

    def __init__(self, arena: HostArena, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.nbytes = staging_bytes(chunk_bytes)
        self._account = arena.account(self.nbytes, "disk_buffers")
        self._free_to_write = threading.BoundedSemaphore(WRITE_BUFFERS)
        self._has_warned = False

    def allocate_to_write(self, nbytes: int, copy_streams: CopyStreams) -> Block:
        if not self._free_to_write.acquire(blocking=False):
            with copy_streams.stalling(copy_streams.compute_stream()):
                self._free_to_write.acquire()
        try:
            return self.allocate(nbytes)
        except BaseException:
            self._free_to_write.release()
            raise

    def free_written(self, block: Block) -> None:
        self.free(block)
        self._free_to_write.release()

    def allocate(self, nbytes: int) -> Block:
        block = self._account.allocate(nbytes)
        if block is None:
            # Backward needs the bytes on disk. The account has room for all buffers, so the arena's own limit is reached.
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "activation offloading: the host arena is full and has no page-locked memory left for copies to and from "
                    f"the disk; up to {self.nbytes} bytes of pageable memory are used in addition. Raise the arena's limit"
                )
            block = Block(nbytes, [], [Pages(nbytes, is_locked=False).bytes])
        return block

    def free(self, block: Block, after: torch.Event | None = None) -> None:
        if block.extents:
            self._account.free(block, after)
        elif after is not None:
            after.synchronize()


class Chunk(NamedTuple):
    """The part of a disk allocation that one staging buffer holds."""

    offset: int  # in the file
    first_byte: int  # of the allocation's bytes
    nbytes: int  # a multiple of PAGE_ALIGN_BYTES; the last chunk ends with padding


class DiskAllocation:
    """Extents of a file, held by their owner and by running tasks only (Note [who may free an extent])."""

    def __init__(self, tier: DiskTier, nbytes: int, extents: list[Extent]) -> None:
        self.tier = tier
        self.written = PendingTasks()
        self._nbytes = nbytes
        self._extents = extents

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None:
        here, staging, left, source = weakref.ref(self), self.tier.staging, None, as_bytes(source)
        for chunk in self._chunks():
            block = staging.allocate_to_write(chunk.nbytes, copy_streams)
            try:
                left = copy_streams.copy_to_host(source[chunk.first_byte : chunk.first_byte + chunk.nbytes], block)
            except BaseException:
                staging.free_written(block)
                raise
            self.written.expect()
            task = _ChunkTask(here, self.tier, self.written, chunk, copy_streams)
            self.tier.file.submit(partial(task.write, block, left), writes=True)
        return left

    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None:
        fetch_buffer.allocate()
        here, there, issued = weakref.ref(self), weakref.ref(fetch_buffer), PendingTasks()
        fetch_buffer.issued = issued
        for chunk in self._chunks():
            issued.expect()
            task = _ChunkTask(here, self.tier, self.written, chunk, copy_streams)
            self.tier.file.submit(partial(task.read, there, issued), writes=False)

    def free(self) -> None:
        self.tier.freed.append(self._nbytes)

    def __del__(self) -> None:
        self.tier.file.freed.append(self._extents)

    def _chunks(self) -> Iterator[Chunk]:
        first_byte = 0
        for extent in self._extents:
            for start in range(0, extent.length, self.tier.staging.chunk_bytes):
                nbytes = min(self.tier.staging.chunk_bytes, extent.length - start)
                yield Chunk(extent.start + start, first_byte, nbytes)
                first_byte += nbytes


class _ChunkTask(NamedTuple):
    """What a thread does with a chunk; for its references see Note [who may free an extent]."""

    allocation: weakref.ref[DiskAllocation]
    tier: DiskTier
    written: PendingTasks
    chunk: Chunk
    copy_streams: CopyStreams

    def write(self, block: Block, copied: torch.Event | None) -> None:
        failure: BaseException | None = None
        try:
            if copied is not None:
                with self.copy_streams.device_is_current():
                    copied.synchronize()
            allocation = self.allocation()
            if allocation is not None:
                with self.tier.working("write", self.chunk):
                    self.tier.file.write(block.views, self.chunk.offset)
        except BaseException as error:
            failure = _without_frames(error)
        allocation = None  # dropped before waiters continue, so that its extents are free by then
        self.tier.staging.free_written(block)
        self.written.done(failure)

    def read(self, there: weakref.ref[FetchBuffer], issued: PendingTasks) -> None:
        failure: BaseException | None = None
        copied: torch.Event | None = None
        try:
            self.written.wait()
            with self.copy_streams.device_is_current():
                copied = self._fetch(self.allocation(), there())
        except BaseException as error:
            failure = _without_frames(error)
        issued.done(failure)
        if copied is not None:
            with self.copy_streams.device_is_current():
                copied.synchronize()  # else this thread would fill all staging buffers while the device is busy

    def _fetch(self, allocation: DiskAllocation | None, fetch_buffer: FetchBuffer | None) -> torch.Event | None:
        if allocation is None or fetch_buffer is None:
            return None
        staging, chunk = self.tier.staging, self.chunk
        block, copied = staging.allocate(chunk.nbytes), None
        try:
            with self.tier.working("read", chunk):
                self.tier.file.read(block.views, chunk.offset)
            target = as_bytes(fetch_buffer.tensor)[chunk.first_byte : chunk.first_byte + block.nbytes]
            copied = self.copy_streams.copy_into(target, block, fetch_buffer)
        finally:
            staging.free(block, copied)
        return copied


def _without_frames(error: BaseException) -> BaseException:
    # Kept until `wait` raises it. Until then the frames of its traceback would keep the allocation and the buffer alive.
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class DiskTier:
    """Space in a file. A `warning` is logged when it is first used."""

    def __init__(self, file: ExtentFile, staging: StagingBuffers, warning: str | None) -> None:
        self.file = file
        self.staging = staging
        self.freed: deque[int] = deque()
        self.moved_bytes = 0
        self.busy_ms = 0.0  # time in which at least one thread was writing or reading
        self._held_bytes = 0
        self._warning = warning
        self._busy_threads = 0
        self._busy_since = 0.0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> DiskAllocation:
        extents = self.file.allocate(nbytes)
        if self._warning is not None:
            logger.warning(self._warning)
            self._warning = None
        self._add_to_held(nbytes)
        return DiskAllocation(self, nbytes, extents)

    @property
    def held_bytes(self) -> int:
        return self._add_to_held(0)

    def _add_to_held(self, nbytes: int) -> int:
        with self._lock:
            self._held_bytes += nbytes
            while self.freed:  # at each allocation: a program may never ask for the statistics
                self._held_bytes -= self.freed.popleft()
            return self._held_bytes

    @contextlib.contextmanager
    def working(self, what: str, chunk: Chunk) -> Iterator[None]:
        """Count time and bytes of a block that does `what` ("write" or "read") with a chunk; name the chunk in errors."""
        with self._lock:
            if self._busy_threads == 0:
                self._busy_since = time.perf_counter()
            self._busy_threads += 1
        try:
            yield
            with self._lock:
                self.moved_bytes += chunk.nbytes
        except OSError as error:
            raise DiskError(
                error.errno,
                f"offloading to disk failed to {what} {chunk.nbytes} bytes at byte {chunk.offset} of its file "
                f"({error.strerror}); this step's gradients are incomplete. Check the disk, or choose another directory",
                self.file.directory,
            ) from error
        finally:
            with self._lock:
                self._busy_threads -= 1
                if self._busy_threads == 0:
                    self.busy_ms += (time.perf_counter() - self._busy_since) * 1e3


def trim() -> int:
    """Return unused slabs of all arenas and unused files on disk to the system; return the freed host memory [bytes]."""
    for file in extent_files():
        file.trim()
    return sum(host_arena(pinned).trim() for pinned in (False, True))


WRITER_THREADS = 4


class DiskError(OSError):
    """The disk tier's directory cannot be used, is full, or failed to read or write."""


class ExtentFile:
    """An unnamed file, made here or by another process (`descriptor`, then closed with this), and its threads."""

    def __init__(self, directory: str | os.PathLike[str], descriptor: int | None = None) -> None:
        self.directory = directory
        self.freed: deque[list[Extent]] = deque()  # appended to on any thread, see Note [who may free an extent]
        self.nbytes = 0  # its size
        self._ranges = RangeAllocator()
        self._lock = threading.Lock()
        self._process = os.getpid()
        if descriptor is None:
            file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
            weakref.finalize(self, file.close)
            self.descriptor = file.fileno()
            self._allow_direct()
        else:
            weakref.finalize(self, os.close, descriptor)
            self.descriptor = descriptor
        # Two pools, for a read may wait for writes: see Note [reads and writes cannot wait for each other].
        self._writers = ThreadPoolExecutor(WRITER_THREADS, "rlx-offload-write")
        self._readers = ThreadPoolExecutor(READER_THREADS, "rlx-offload-read")
        self._unfinished = PendingTasks()

    def allocate(self, nbytes: int) -> list[Extent]:
        """Return extents of `nbytes`, rounded up to `PAGE_ALIGN_BYTES`; DiskError if the file system has no room for them."""
        self._check_process()
        needed = page_aligned(nbytes)
        with self._lock:
            self._settle()
            extents = self._ranges.allocate(needed)
            if extents is None:
                self._grow(needed - self._ranges.usable_bytes(needed))
                extents = self._ranges.allocate(needed)
            assert extents is not None
            return extents

    def submit(self, task: Callable[[], None], writes: bool) -> None:
        self._check_process()
        # If this fails because no thread can be started, a running thread may still take the task: it is not counted then.
        future = (self._writers if writes else self._readers).submit(task)
        self._unfinished.expect()
        future.add_done_callback(lambda _: self._unfinished.done())

    def drain(self) -> None:
        self._unfinished.wait()

    def write(self, views: Sequence[Tensor], offset: int) -> None:
        """Write host memory to the file, from byte `offset`; lengths and offset are multiples of `PAGE_ALIGN_BYTES`."""
        for view in views:
            left = _bytes_of(view)
            while left:
                written = os.pwrite(self.descriptor, left, offset)
                left, offset = left[written:], offset + written

    def read(self, views: Sequence[Tensor], offset: int) -> None:
        for view in views:
            left = _bytes_of(view)
            while left:
                read = os.preadv(self.descriptor, [left], offset)
                if read == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                left, offset = left[read:], offset + read

    def trim(self) -> int:
        """Wait for all tasks, then empty the file if nothing of it is in use; return how many bytes that freed."""
        self.drain()
        with self._lock:
            self._settle()
            if not self._ranges.remove_free_slabs():
                return 0
            freed, self.nbytes = self.nbytes, 0
            os.ftruncate(self.descriptor, 0)
            return freed

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "offloading to disk was enabled before this process was forked, and threads do not survive a "
                "fork; enable it in the process that trains"
            )

    def _settle(self) -> None:
        while self.freed:
            self._ranges.free(self.freed.popleft())

    def _grow(self, missing: int) -> None:
        """Extend the file by a growth step or, if the disk has no room for that, by the missing bytes."""
        for more in (growth_bytes(missing, self.nbytes), missing):
            try:
                os.posix_fallocate(self.descriptor, self.nbytes, more)
                break
            except OSError as error:
                failure = error
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    # This file system cannot reserve room. If it is full, a write fails.
                    os.ftruncate(self.descriptor, self.nbytes + more)
                    break
                os.ftruncate(self.descriptor, self.nbytes)
        else:
            raise DiskError(
                failure.errno,
                f"offloading to disk has a file of {self.nbytes} bytes and needs {missing} more "
                f"({failure.strerror}); free disk space, choose another directory, or offload less",
                self.directory,
            ) from failure
        self._ranges.extend(0, more)
        self.nbytes += more

    def _allow_direct(self) -> None:
        """Enable direct I/O and write a page as a test; if that fails, disable it and use the page cache."""
        page = mmap.mmap(-1, PAGE_ALIGN_BYTES)
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self.descriptor, page, 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)
            os.pwrite(self.descriptor, page, 0)
            logger.info("activation offloading: %s has no direct I/O; the page cache is used", self.directory)
        os.ftruncate(self.descriptor, 0)


def _bytes_of(view: Tensor) -> memoryview:
    # The caller keeps the tensor alive.
    return memoryview((ctypes.c_char * view.numel()).from_address(view.data_ptr())).cast("B")


_FILES: weakref.WeakValueDictionary[tuple[int, int, int], ExtentFile] = weakref.WeakValueDictionary()
_FILES_LOCK = threading.Lock()


def extent_file(directory: str | os.PathLike[str]) -> ExtentFile:
    with _FILES_LOCK, usable(directory):
        folder = os.stat(directory)
        key = (os.getpid(), folder.st_dev, folder.st_ino)
        file = _FILES.get(key)
        if file is None:
            file = _FILES[key] = ExtentFile(directory)
        return file


@contextmanager
def usable(directory: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(
            error.errno,
            f"offloading to disk cannot use the directory ({error.strerror}); expected a folder that "
            "exists, is writable and has room. Create it, or choose another directory",
            directory,
        ) from error


def extent_files() -> list[ExtentFile]:
    with _FILES_LOCK:
        return [file for (process, _, _), file in _FILES.items() if process == os.getpid()]
