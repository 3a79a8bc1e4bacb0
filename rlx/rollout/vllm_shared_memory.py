"""The named shared memory through which vLLM's processes on CPU exchange tensors."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
