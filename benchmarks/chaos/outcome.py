"""How a run ended: what it left on the machine, what two runs must have in common, and the time that a failure cost."""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

RESTART = re.compile(r"^rlx restart \d+ of ", re.MULTILINE)
POLL_S = 0.1
SHARED = re.compile(r"(/dev/shm/\S+)$", re.MULTILINE)
MARK = "RLX_CHAOS_MARK"
PATIENCE_S = 5.0  # Ray's processes end by themselves a moment after the command
VARYING = ("time", "timing_s/", "perf/", "memory/", "reward_process", "reward/retries", "reward/processes")


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


class Trajectory(NamedTuple):
    """What is left of a run.

    Args:
        rows: of metrics.jsonl, in order, without what varies.
        weights: digest of the actor's weights and optimizer in the last checkpoint.
        validation: digest of each dump of a validation, by step.
    """

    rows: list[dict[str, Any]]
    weights: str
    validation: dict[str, str]


def of_run(folder: Path) -> Trajectory:
    """Read the trajectory of a finished run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saved = sorted(folder.glob("checkpoints/global_step_*"), key=lambda each: int(each.name.rpartition("_")[2]))
    dumps = {file.name: _digest([file]) for file in sorted(folder.glob("validation/*.jsonl"))}
    return Trajectory([_without_varying(row) for row in rows], _digest(_tensors_of(saved[-1])), dumps)


def differences(expected: Trajectory, got: Trajectory) -> list[str]:
    """Return in words where two trajectories differ."""
    found = []
    steps, steps_got = ([row["step"] for row in each.rows] for each in (expected, got))
    if steps != steps_got:
        found.append(f"rows of steps {steps_got} instead of {steps}")
    for row, other in zip(expected.rows, got.rows, strict=False):
        names = sorted(name for name in {*row, *other} if row.get(name) != other.get(name))
        if names:
            found.append(f"step {row['step']}: {', '.join(names[:3])} differ ({len(names)} in all)")
            break
    found += ["weights differ"] * (expected.weights != got.weights)
    found += ["validations differ"] * (expected.validation != got.validation)
    return found


def _without_varying(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(VARYING)}


def _tensors_of(checkpoint: Path) -> list[Path]:
    files = [file for file in checkpoint.rglob("*") if file.suffix in (".safetensors", ".distcp")]
    assert files, f"{checkpoint}: got no tensors"
    return sorted(files)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


class Clock:
    """Follows one run through all its commands; a context.

    Args:
        folder: `trainer.default_local_dir`.
        log: output of the command.
        faults: that are done to the run.

    Attributes:
        lost_s: of each failure that a row followed, from its notice to that row. A further notice before a row counts as a
            failure of its own only if a further fault was done.
    """

    def __init__(self, folder: Path, log: Path, faults: int = 1) -> None:
        self.lost_s: list[float] = []
        self._folder, self._log, self._faults = folder, log, faults
        self._restarts = 0
        self._noticed: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> "Clock":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self.look()
        self.look()

    def notice(self) -> None:
        """A failure is known now: the driver is started again, or the command is given again."""
        if self._noticed is None or self._faults > 0:
            self._noticed = time.time()
        self._faults -= 1

    def look(self) -> None:
        """Take in new lines of the log and new rows."""
        restarts = len(RESTART.findall(self._log.read_text(errors="replace"))) if self._log.exists() else 0
        if restarts > self._restarts:
            self._restarts = restarts
            self.notice()
        if self._noticed is not None and (row_s := self._time_of_last_row()) > self._noticed:
            self.lost_s.append(row_s - self._noticed)
            self._noticed = None

    def _time_of_last_row(self) -> float:
        files = sorted(self._folder.glob("*/metrics.jsonl"))
        lines = files[-1].read_bytes().split(b"\n")[:-1] if files else []
        return float(json.loads(lines[-1])["time"]) if lines else 0.0
