"""A file in memory, by which the processes of a machine share one copy of the frozen weights.

The first process of a group makes it (`memfd_create`). No file system shows it, and `/dev/shm` does not limit its size. The others
open it by the first one's descriptor. Each process maps and page-locks the same pages. The system frees them with the last mapping.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def shared_file(nbytes: int, group: dist.ProcessGroup) -> Iterator[int]:
    """Yield a descriptor of the same memory in all processes of a group, which are on one machine and call this together.

    Args:
        nbytes: its length, the same in each process [bytes].
        group: of the processes.

    Raises:
        OSError: the system has no memory left, or does not let one process open a file of another.
    """
    path, file = [""], -1
    is_first = dist.get_rank(group) == 0
    try:
        fault: OSError | None = None
        if is_first:
            try:
                file = os.memfd_create("frozen weights")
                os.ftruncate(file, nbytes)
                path[0] = f"/proc/{os.getpid()}/fd/{file}"
            except OSError as error:
                fault = error
        dist.broadcast_object_list(path, group_src=0, group=group)
        if not path[0]:
            raise fault or OSError("the first process of this machine could not make the memory that all share")
        if not is_first:
            file = os.open(path[0], os.O_RDWR)
        yield file
    finally:
        dist.barrier(group)  # the first one's descriptor stays until all have opened it
        if file >= 0:
            os.close(file)
