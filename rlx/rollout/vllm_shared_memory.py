"""The named shared memory and sockets of vLLM's processes, which would outlive them."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def shared_memory() -> Iterator[None]:
    """Start an engine whose processes exchange tensors through named shared memory; all of them enter.

    Every run on a machine uses the same names, and they remain when a process is killed. So one run of a user starts at a time.
    It unlinks the names before the start, and again as soon as all its processes have opened the memory.
    """
    with open(Path(tempfile.gettempdir()) / f"rlx-vllm-start-{os.getuid()}", "w") as lock:
        if int(os.environ["LOCAL_RANK"]) == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _unlink()
        dist.barrier()
        yield
        dist.barrier()
        _unlink()


def _unlink() -> None:
    for segment in Path("/dev/shm").glob("-tp:*-cpushm_*"):
        segment.unlink(missing_ok=True)


def remove_names(queue: Any) -> None:
    """Remove the files of a queue that all processes of a group have opened: the workers end by SIGKILL, which would leave them.

    Its writer has 25 MB in /dev/shm and two sockets. What the processes have opened stays until they end.
    """
    if queue is None or not queue._is_writer or queue.buffer is None:
        return
    queue.buffer.shared_memory.unlink()
    queue.buffer.is_creator = False  # else it would unlink the name again when it is closed
    for name in ("local_subscribe_addr", "local_notify_addr"):
        address = getattr(queue.handle, name, None)  # not every version has both
        if address is not None:
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
