"""Temporary folders below `$TMPDIR`, or in shared memory, that do not outlive their process, however it ends.

A worker ends by SIGKILL, and then it removes nothing. So a folder bears the name of its process. The supervisor removes the folders of
ended processes when a run ends, and each process does so before it makes a folder, which helps on machines without a supervisor.
"""

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from rlx.identity import machine_identity, start_of

_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"rlx-[a-z]+-(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>[\d.]+)-\w+")


def scratch_folder(purpose: str, memory_bytes: int | None = None) -> "tempfile.TemporaryDirectory[str]":
    """Make a folder of this process.

    Args:
        purpose: a word in lower case.
        memory_bytes: that will be in it, if it is to be in shared memory where that has room for ten times as much; None: on the disk.
    """
    remove_scratch()
    pid, folder = os.getpid(), None
    if memory_bytes is not None and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 10 * memory_bytes:
        folder = _MEMORY
    return tempfile.TemporaryDirectory(prefix=f"rlx-{purpose}-{_machine()}-{pid}-{start_of(pid)}-", dir=folder)


def remove_scratch() -> None:
    """Remove the folders of processes of this machine that have ended."""
    places = {Path(tempfile.gettempdir()), _MEMORY}
    for folder in (each for place in places for each in place.glob("rlx-*-*-*-*-*")):
        found = _NAME.fullmatch(folder.name)
        if found and found["machine"] == _machine() and start_of(int(found["pid"])) != found["start"]:
            shutil.rmtree(folder, ignore_errors=True)


def _machine() -> str:
    return hashlib.sha256(machine_identity().encode()).hexdigest()[:12]
