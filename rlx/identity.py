"""Which machine and which process this is, told from all others, also after a restart of either."""

import contextlib
import os
import socket
import sys
from pathlib import Path

import psutil


def machine_identity() -> str:
    """Return what identifies this machine and container among all others.

    Such processes can open each other's files in /proc. A host's name says less: clones of a machine and containers may share it.
    """
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {psutil.boot_time()}"


def start_of(pid: int) -> str | None:
    """Return when a process of this machine started, None if it has ended. With `pid` it names one process for good.

    On Linux it is in ticks since the boot, which no change of the clock touches.
    """
    if sys.platform != "linux":
        with contextlib.suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())
        return None
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]
