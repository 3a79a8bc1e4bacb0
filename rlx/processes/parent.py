"""The owner's side of such a process: start it, and end it with all processes that it started."""

import contextlib
import os
import signal
import subprocess
import sys

from rlx.processes.child import OUT_OF_MEMORY

LOAD_LIMIT_S = 300.0  # to import a user's code


class ChildProcess:
    """A Python process of its own session, whose end of a connection is the descriptor `theirs`.

    Args:
        module: to run; its arguments are the descriptor, this process's id, and `arguments`.
        theirs: the descriptor, inherited; the caller closes its own copy.
        arguments: whole numbers.
        memory_key: key of the configuration that limits its memory, for messages.
        shared: other descriptors that it inherits.
    """

    def __init__(
        self, module: str, theirs: int, arguments: tuple[int, ...], memory_key: str, shared: tuple[int, ...] = ()
    ):
        # The process gets the owner's whole import path. Processes share the cores, so each uses one thread.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._memory_key = memory_key
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, (theirs, os.getpid(), *arguments))],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the owner's output must not contain what a user's code prints
            env=environment,
            pass_fds=(theirs, *shared),
            start_new_session=True,  # the owner handles Ctrl-C, and processes that it starts can be killed too
        )

    def wait(self, limit_s: float) -> None:
        """Wait until it has ended, at most this long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def end(self) -> str:
        """Kill it and all processes it started; return in words how it ended if it had ended before."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if code == OUT_OF_MEMORY:
            return f"ran out of memory ({self._memory_key})"
        return f"ended its process ({f'exit code {code}' if code >= 0 else signal.Signals(-code).name})"
