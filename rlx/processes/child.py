"""A process that ends with its owner: how the owner starts and ends it, and what it does first itself."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

OUT_OF_MEMORY = 97
"""Exit code after a MemoryError: the process ends to free the memory that the code still holds."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start(
    module: str, inherited: Sequence[int], arguments: Iterable[object], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start `python -m MODULE INHERITED… OWNER ARGUMENTS…`: it inherits descriptors, and the owner is this process.

    Its `main` has to call `end_with(OWNER)`.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # the owner's whole import path
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, (*inherited, os.getpid(), *arguments))],
        stdin=subprocess.DEVNULL,
        stdout=2,  # the owner's output must not contain what it prints
        env={**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        pass_fds=inherited,
        start_new_session=True,  # the owner handles Ctrl-C, and processes that it starts can be killed too
    )


def end(process: "subprocess.Popen[bytes]", patience_s: float = 0.0) -> int:
    """Kill a process after this time, with all processes that it started; return its exit code, or that of its own end."""
    if patience_s > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def in_words(code: int) -> str:
    """Return how a process with this exit code has ended."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


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
