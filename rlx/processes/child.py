"""The inside of an isolated process: it ends with its owner and limits its memory."""

import ctypes
import os
import resource
import signal
import sys

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
