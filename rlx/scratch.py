"""Temporary folders below `$TMPDIR` that do not outlive their process, however it ends.

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

_NAME = re.compile(r"rlx-[a-z]+-(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>[\d.]+)-\w+")


def scratch_folder(purpose: str) -> "tempfile.TemporaryDirectory[str]":
    """Make a folder of this process; `purpose` is a word in lower case."""
    remove_scratch()
    pid = os.getpid()
    return tempfile.TemporaryDirectory(prefix=f"rlx-{purpose}-{_machine()}-{pid}-{start_of(pid)}-")


def remove_scratch() -> None:
    """Remove the folders of processes of this machine that have ended."""
    for folder in Path(tempfile.gettempdir()).glob("rlx-*-*-*-*-*"):
        found = _NAME.fullmatch(folder.name)
        if found and found["machine"] == _machine() and start_of(int(found["pid"])) != found["start"]:
            shutil.rmtree(folder, ignore_errors=True)


def _machine() -> str:
    return hashlib.sha256(machine_identity().encode()).hexdigest()[:12]
