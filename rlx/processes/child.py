"""The inside of such a process: it ends with its owner, and limits itself."""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OUT_OF_MEMORY = 97
"""Exit code after a MemoryError: the process ends to free the memory that the code still holds."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Let the system kill this process when the owner's thread that started it ends, even in C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the owner has already ended
        os._exit(0)


def limit_memory(memory_bytes: int) -> None:
    """Let this process allocate no more than this; 0: any amount."""
    if memory_bytes:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


class TooLong(BaseException):
    """A call has used its time. No Exception, so that libraries do not catch it."""


@contextmanager
def interrupted_after(limit_s: float, waiting_counts: bool = False) -> Iterator[None]:
    """Raise TooLong inside a block that uses the processor for longer, or with `waiting_counts` takes longer; 0: never.

    The signal comes again until the block ends, because an exception in a callback of C code is lost. Code in C that never
    returns to Python is not interrupted. It works in the main thread alone.
    """
    if not limit_s:
        yield
        return
    signal_number, timer = (
        (signal.SIGALRM, signal.ITIMER_REAL) if waiting_counts else (signal.SIGPROF, signal.ITIMER_PROF)
    )

    def interrupt(*_: object) -> None:
        raise TooLong

    signal.signal(signal_number, interrupt)
    try:
        signal.setitimer(timer, limit_s, 0.1)
        yield
    finally:
        signal.setitimer(timer, 0)
