"""The processes that descend from this one: reap orphans, end all of them, remove what they leave in shared memory."""

import contextlib
import ctypes
import os
import re
import sys
import time
from pathlib import Path

import psutil

from rlx.scratch import remove_scratch

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Those that a run needs, by the end of the program's name; the raylet ends when one of its agents does.
RAY_PROCESSES = {
    "/gcs_server": "the gcs_server",
    "/raylet": "the raylet",
    "ray::DashboardAgent": "the dashboard agent",
    "ray::RuntimeEnvAgent": "the runtime environment agent",
}
SHARED_MEMORY = re.compile(r"(/dev/shm/\S+)$", re.MULTILINE)
END_S = 20.0  # a process in the middle of device I/O outlives SIGKILL for a while


def adopt_orphans() -> None:
    """Let the system make this process the parent of descendants whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(child: int) -> None:
    """Collect the exit codes of ended orphans, but not that of `child`."""
    with contextlib.suppress(ChildProcessError):  # there are no children at all
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def status_of(pid: int) -> str:
    """Return psutil's status of a process; that of a zombie if there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status())
    return psutil.STATUS_ZOMBIE


def is_dead(pid: int) -> bool:
    """Whether the process has ended, also if its parent has not noticed."""
    return status_of(pid) == psutil.STATUS_ZOMBIE


def ray_processes(driver: int) -> dict[str, int]:
    """Return name -> process id of Ray's processes that the driver has started; one that has just ended is among them."""
    found: dict[str, int] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(driver).children(recursive=True):
            try:
                program = [part.strip() for part in process.cmdline()[:3]]
            except psutil.ZombieProcess:
                program = [f"/{process.name()}"]
            except psutil.Error:
                continue
            for end, name in RAY_PROCESSES.items():
                if any(part.endswith(end) for part in program):
                    found.setdefault(name, process.pid)  # a child that it has just forked comes later, under its name
    return found


def end_all(child: int) -> None:
    """Kill all descendants, wait for their end, and remove their files in /dev/shm and their temporary folders."""
    files: set[str] = set()
    deadline_s = time.monotonic() + END_S
    while living := [each for each in psutil.Process().children(recursive=True) if not is_dead(each.pid)]:
        for each in living:
            files |= _shared_memory_of(each.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    reap_orphans(child)
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
    remove_scratch()


def _shared_memory_of(pid: int) -> set[str]:
    try:
        return set(SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()
