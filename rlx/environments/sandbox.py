"""Run a model's Python code in a process of its own, without network, with limits.

Note [what the sandbox protects from]. On Linux the code runs in name spaces of its own (`unshare`): it has no network, sees no process
but its own, writes in an empty scratch folder in memory alone, and ends with all processes that it starts. It has limits of time,
memory, files, processes and output, and none of the run's environment variables.

It does not protect from: reading any file that the user of the run may read, such as keys in the home folder, and writing what it read
into the conversation; faults of the kernel; use of the processors up to the limits. A container with the run alone in it, or another
user, protects from the first.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rlx.environments.sandbox_child import NOT_ISOLATED
from rlx.user_code import UserCodeError

PROGRAM = Path(__file__).with_name("sandbox_child.py")
SANDBOX_VARIABLES = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
START_LIMIT_S = 60.0
PIPE_ENDING_S = 5.0


class NotIsolated(UserCodeError):
    """The system allows no name spaces, so the sandbox would have network and files."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run of code.

    Args:
        time_s: longest run [seconds], of waiting and of the processor.
        memory_bytes: of each of its processes.
        file_bytes: of all files together.
        output_bytes: that it may print; more ends it.
        processes: that it may have at a time, threads included.
        require_isolation: whether it is an error if the system allows no name spaces. Otherwise the code has the network and may write
            files as the user of the run may.
    """

    time_s: float = 10.0
    memory_bytes: int = 10**9
    file_bytes: int = 10**8
    output_bytes: int = 10**5
    processes: int = 64
    require_isolation: bool = True


class RanCode(NamedTuple):
    """The end of a run: what it printed (both streams), and why it failed; empty if it did not."""

    output: str
    fault: str = ""


def check_isolation(limits: SandboxLimits) -> None:
    """Raise NotIsolated if the limits require an isolation that the system refuses."""
    tried = subprocess.run(
        _command(limits), input=b"", capture_output=True, env=SANDBOX_VARIABLES, timeout=START_LIMIT_S
    )
    if limits.require_isolation and tried.returncode == NOT_ISOLATED:
        raise NotIsolated(
            f"the system allows no name spaces of users, network and files ({tried.stdout.decode()}), so a model's code would have "
            "the network and your files; allow them (in Docker: --security-opt seccomp=unconfined), or set "
            "environment.kwargs.require_isolation=false"
        )
    if tried.returncode not in (0, NOT_ISOLATED):
        said = (tried.stdout + tried.stderr).decode(errors="replace").strip()[-300:]
        raise UserCodeError(f"the sandbox cannot run an empty program with {limits}: {said}")


def _command(limits: SandboxLimits) -> list[str]:
    values = {**asdict(limits), "cpu_s": int(limits.time_s) + 1}
    return [sys.executable, "-I", "-u", str(PROGRAM), json.dumps(values)]


async def run_python(code: str, limits: SandboxLimits) -> RanCode:
    """Run code to its end or to a limit. Call `check_isolation` once before."""
    process = await asyncio.create_subprocess_exec(
        *_command(limits),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=SANDBOX_VARIABLES,
        start_new_session=True,
    )
    until = time.monotonic() + limits.time_s
    try:
        fault, output = await _output(process, code.encode("utf-8", "replace"), limits, until)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # something may hold its output open
                await asyncio.wait_for(process.wait(), PIPE_ENDING_S)
    text = output.decode("utf-8", "replace")
    if not fault and process.returncode != 0:
        fault = f"exit code {process.returncode}"
    return RanCode(text, fault)


async def _output(
    process: asyncio.subprocess.Process, code: bytes, limits: SandboxLimits, until: float
) -> tuple[str, bytes]:
    """Send the code, and return why its process has to be ended (empty: it ended by itself) and what it printed."""
    assert process.stdin is not None and process.stdout is not None
    output = bytearray()
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
            process.stdin.write(code)
            process.stdin.close()
            while chunk := await process.stdout.read(2**16):
                output += chunk
                if len(output) > limits.output_bytes:
                    return f"printed more than {limits.output_bytes:,} bytes", bytes(output[: limits.output_bytes])
            await process.wait()
    except TimeoutError:
        return f"took longer than {limits.time_s:g} s", bytes(output)
    return "", bytes(output)
