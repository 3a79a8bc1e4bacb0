"""What a run has left on the machine: processes that inherited its mark, and files."""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

SHARED = re.compile(r"(/dev/shm/\S+)$", re.MULTILINE)
MARK = "RLX_CHAOS_MARK"
PATIENCE_S = 5.0  # Ray's processes end by themselves a moment after the command


def new_mark() -> Mapping[str, str]:
    """Return the variable by which processes of a run are told from those of all others."""
    return {MARK: uuid.uuid4().hex}


def marked(mark: Mapping[str, str]) -> Iterator[psutil.Process]:
    """Yield the living processes that have inherited the mark."""
    words = f"{MARK}={mark[MARK]}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError, psutil.Error):
                if words in (folder / "environ").read_bytes().split(b"\0"):
                    process = psutil.Process(int(folder.name))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        yield process


def end_what_is_left(mark: Mapping[str, str], patience_s: float = PATIENCE_S) -> list[str]:
    """Kill the processes that live so many seconds after their run has ended, and return their command lines."""
    deadline_s = time.monotonic() + patience_s
    while (left := list(marked(mark))) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    commands = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            commands.append(f"{' '.join(process.cmdline())[:80]} ({process.pid})")
            process.kill()
    return commands


def shared_files(mark: Mapping[str, str]) -> set[str]:
    """Return the files in /dev/shm that a run's processes use."""
    found: set[str] = set()
    for process in marked(mark):
        with contextlib.suppress(OSError):
            found |= set(SHARED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return found
