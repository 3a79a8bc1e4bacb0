"""What goes wrong in a run, and when.

A fault is done to the processes of a run or to its folder. A moment is a condition that the harness waits for. Both are drawn
from a seed, so that a run can be repeated.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ENTRY, DRIVER = "rlx.main_ppo", "rlx.driver"
# The processes of a run, by words of their command lines.
PROCESSES = {
    "worker": "ray::WorkerProcess",
    "driver": DRIVER,
    "supervisor": ENTRY,
    "raylet": "raylet/raylet",
    "gcs_server": "gcs/gcs_server",
    "dashboard agent": "ray::DashboardAgent",
    "runtime agent": "ray::RuntimeEnvAgent",
    "reward process": "rlx.rewards.scoring_process",
    "engine": "rlx.rollout.engine_process",
}
MOMENTS = ("start", "rollout", "update", "inside a save", "between files", "resume")
POLL_S = 0.01
OVER = "the run was over"


class Run(NamedTuple):
    """A run as faults see it.

    Args:
        supervisor: process id of the command.
        folder: `trainer.default_local_dir`.
        start_s: from the command to the first row, in a run without faults.
    """

    supervisor: int
    folder: Path
    start_s: float

    def processes(self, kind: str) -> list[psutil.Process]:
        """Return the living processes of a kind, in order of their ids."""
        try:
            own = psutil.Process(self.supervisor)
            family = [own] if kind == "supervisor" else own.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return sorted((each for each in family if PROCESSES[kind] in command_of(each)), key=lambda each: each.pid)

    def times(self) -> list[float]:
        """Return the times of the rows of the newest metrics.jsonl [s since 1970]."""
        files = sorted(self.folder.glob("*/metrics.jsonl"))
        lines = files[-1].read_bytes().split(b"\n")[:-1] if files else []
        return [json.loads(line)["time"] for line in lines]

    def rows(self) -> int:
        """Return the number of complete lines of the newest metrics.jsonl."""
        return len(self.times())

    def is_over(self) -> bool:
        """Whether the command has ended."""
        try:
            return psutil.Process(self.supervisor).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


# Moments ------------------------------------------------------------------------------------------------------------


def wait_for(moment: str, run: Run, draw: random.Random, steps: int) -> bool:
    """Wait for a moment; return False if the run ended before it came."""
    if moment == "start":
        return _sleep(draw.uniform(0, run.start_s), run)
    if moment in ("rollout", "update"):
        row = draw.randrange(2, steps)
        # A step begins with its rollout; the update ends it.
        share = draw.uniform(0, 0.4) if moment == "rollout" else draw.uniform(0.5, 0.9)
        return _until(lambda: run.rows() >= row, run) and _sleep(share * _last_step_s(run), run)
    if moment == "inside a save":
        step = draw.choice([1, 2, 3])
        return _until(lambda: len(_saves(run)) >= step, run) and _sleep(draw.uniform(0, 0.15), run)
    if moment == "between files":
        count = draw.randrange(1, 25)
        return _until(lambda: len(_saved_files(run)) >= count, run)
    assert moment == "resume", moment
    # The harness has killed a worker before; the new driver is at work.
    first = draw.randrange(2, steps - 1)
    if not _until(lambda: run.rows() >= first, run):
        return False
    before = {each.pid for each in run.processes("driver")}
    kill("worker", run, draw)
    if not _until(lambda: bool({each.pid for each in run.processes("driver")} - before), run):
        return False
    return _sleep(draw.uniform(0, run.start_s), run)


def _last_step_s(run: Run) -> float:
    *_, before, last = run.times()
    return last - before


def _saves(run: Run) -> list[Path]:
    """The checkpoint folders, finished or not."""
    return [each for each in run.folder.glob("*/checkpoints/*") if "global_step" in each.name]


def _whole(run: Run) -> list[Path]:
    """The checkpoint folders that have their final name."""
    return [each for each in _saves(run) if each.name.startswith("global_step_")]


def _saved_files(run: Run) -> list[str]:
    return [name for save in _saves(run) for _, _, names in os.walk(save) for name in names]


def _until(condition: Callable[[], bool], run: Run) -> bool:
    while not run.is_over():
        with contextlib.suppress(OSError):
            if condition():
                return True
        time.sleep(POLL_S)
    return False


def _sleep(seconds: float, run: Run) -> bool:
    time.sleep(seconds)
    return not run.is_over()


# Faults -------------------------------------------------------------------------------------------------------------


def kill(kind: str, run: Run, draw: random.Random) -> str:
    """Kill a process of this kind, or the driver if there is none yet."""
    return _signal(kind, run, draw, signal.SIGKILL)


def stop(kind: str, run: Run, draw: random.Random) -> str:
    """Freeze a process, so that it lives and makes no progress."""
    return _signal(kind, run, draw, signal.SIGSTOP)


def _signal(kind: str, run: Run, draw: random.Random, signum: int) -> str:
    found = run.processes(kind) or run.processes("driver") or run.processes("supervisor")
    if not found:
        return OVER
    chosen = draw.choice(found)
    name = next((name for name, words in PROCESSES.items() if words in command_of(chosen)), kind)
    with contextlib.suppress(psutil.NoSuchProcess):
        chosen.send_signal(signum)
    return f"{signal.Signals(signum).name} {name} {chosen.pid}"


def flip_bytes(run: Run, draw: random.Random) -> str:
    """Wait for a checkpoint, kill the command, then flip bits of a file of the newest one."""
    if not _until(lambda: bool(_whole(run)), run):
        return OVER
    kill("supervisor", run, draw)
    return f"SIGKILL supervisor, {_flip(run, draw)}"


def _flip(run: Run, draw: random.Random) -> str:
    newest = max(_whole(run), key=lambda each: int(each.name.rpartition("_")[2]))
    files = sorted(each for each in newest.rglob("*") if each.is_file() and each.stat().st_size)
    file = draw.choice(files)
    data = bytearray(file.read_bytes())
    for _ in range(4):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return f"bits of {file.relative_to(newest.parent)}"


def skew_clocks(run: Run, draw: random.Random) -> str:
    """Kill the command, then give the files of all checkpoints random times of the last year."""
    done = kill("supervisor", run, draw)
    for save in _saves(run):
        for file in [save, *save.rglob("*")]:
            at = time.time() - draw.uniform(0, 365 * 86400)
            with contextlib.suppress(FileNotFoundError):
                os.utime(file, (at, at))
    return f"{done}, times of {len(_saves(run))} checkpoints"


def fill_disk(run: Run, draw: random.Random) -> str:
    """Leave no room on the run's disk, until the run has ended or for some seconds."""
    filler = run.folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"\0" * (1 << 16))
            file.flush()
    deadline_s = time.monotonic() + 60
    while not run.is_over() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    filler.unlink()
    return "disk full"


SIGNALLED = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
"""Faults that the command itself ends with, leaving nothing."""
FAULTS: dict[str, Callable[[Run, random.Random], str]] = {
    **{f"kill {kind}": (lambda run, draw, kind=kind: kill(kind, run, draw)) for kind in PROCESSES},
    **{name: (lambda run, draw, n=n: _signal("supervisor", run, draw, n)) for name, n in SIGNALLED.items()},
    **{f"stop {kind}": (lambda run, draw, kind=kind: stop(kind, run, draw)) for kind in ("worker", "engine")},
    "flip bytes": flip_bytes,
    "skew clocks": skew_clocks,
    "fill disk": fill_disk,
}
# A command that this ends is given again, as a person or systemd would.
ENDS_THE_COMMAND = {"kill supervisor", "interrupt", "terminate", "flip bytes", "skew clocks", "fill disk"}


class Plan(NamedTuple):
    """One fault at one moment."""

    seed: int
    fault: str
    moment: str


def plans(first_seed: int, count: int, faults: tuple[str, ...] = tuple(FAULTS)) -> Iterator[Plan]:
    """Yield one plan per seed: the faults in turn, each at a random moment."""
    for seed in range(first_seed, first_seed + count):
        yield Plan(seed, faults[seed % len(faults)], random.Random(seed).choice(MOMENTS))
