"""One copy of the frozen weights for all processes of a machine.

The first process of a group makes a file in memory (`memfd_create`), which no file system shows and whose size `/dev/shm` does not
limit. The others open it by the first one's descriptor. Each process maps and page-locks the same pages. The system frees them
with the last mapping.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from rlx.offload.storage.pages import Pages


def shared_pages(nbytes: int, is_locked: bool, group: dist.ProcessGroup) -> Pages:
    """Return memory that all processes of a group have, which are on one machine. All of them call this together.

    Args:
        nbytes: its length, the same in each process [bytes].
        is_locked: see `Pages`.
        group: of the processes.

    Raises:
        OSError: the system has no memory left, or does not let one process open a file of another.
        RuntimeError: the system refuses to lock the memory.
    """
    path, file = [""], -1
    is_first = dist.get_rank(group) == 0
    try:
        if is_first:
            file = os.memfd_create("frozen weights")
            os.ftruncate(file, nbytes)
            path[0] = f"/proc/{os.getpid()}/fd/{file}"
        dist.broadcast_object_list(path, group_src=0, group=group)
        if not is_first:
            file = os.open(path[0], os.O_RDWR)
        return Pages(nbytes, is_locked, file)
    finally:
        dist.barrier(group)  # the first one's descriptor stays until all have opened it
        if file >= 0:
            os.close(file)
