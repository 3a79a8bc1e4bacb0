"""When a step did what: phases on the driver, the requests of each engine, how busy each process was, and offloading's copies.

`timeline.json` in a run's folder keeps the last step and the slowest one.
"""

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rlx.checkpoint.folders import replacing_file
from rlx.config.schema import PPOConfig
from rlx.errors import storing
from rlx.trainer.bottleneck import costliest
from rlx.trainer.progress import PHASES, Span, duration
from rlx.trainer.tracking import TrackingError

TIMELINE_FILE = "timeline.json"
WRITE_S, WRITE_SHARE = 10.0, 2e-3  # from one write to the next, at least; and the largest share of the time for writing
MOST_READINGS = 4_000  # of all processes in a step
MOST_SPANS = 1_000
COPIES = ("offloaded_bytes", "copied_bytes", "disk_bytes", "stall_ms")
OUTSIDE = ("validate", "checkpoint")
"""Phases that follow only some steps: such a step is not slow for that."""
TAIL_SHARE = 0.25  # a sampler with fewer of its requests left is in its tail
BLUE, GREEN, RED, GREY = "#2563eb", "#16966b", "#c8324a", "#7b8794"

Step = dict[str, Any]
"""
step, seconds: its number and duration
is_first: of its process, so that it includes what is done once, such as compilation
phases: [name, start, end] of each, in seconds from the step's beginning
processes: of each the lists of `ReadingLog.take`, with `at` in seconds from the step's beginning in place of `age`
copies: COPIES of each role that offloads
"""


class Timeline:
    """Collects a run's steps; `read` and `end` are called in each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / TIMELINE_FILE
        self._kept: dict[str, Step] = {}  # last and slowest
        self._costs = Counter[str](), Counter[str]()  # of this process's first step, and of all others
        self._steps = 0
        self._processes: list[defaultdict[str, list[float]]] = []
        self._due_s = -math.inf

    def rewind(self, step: int) -> str | None:
        """Continue the file of a run that goes on from this step; return a notice if it is damaged and begins anew."""
        try:
            kept = read_timeline(self._file)
        except TrackingError as fault:
            return f"{fault}. It begins anew"
        self._kept = {name: each for name, each in kept.items() if each["step"] <= step}
        return None

    def read(self, readings: Sequence[Mapping[str, list[float]]]) -> None:
        """Take what each process has just recorded, see `ReadingLog.take`."""
        now = time.perf_counter()
        self._processes = self._processes or [defaultdict(list) for _ in readings]
        for process, new in zip(self._processes, readings, strict=True):
            for name in process.keys() - new.keys():  # NVML has failed meanwhile
                del process[name]
            for name, values in new.items():
                process[name] += [now - age for age in values] if name == "age" else values

    def end(self, step: int, began: float, spans: Sequence[Span], metrics: Mapping[str, float]) -> None:
        """Take a finished step with its `timing_s/...`; keep it if it is the slowest."""
        processes, self._processes = self._processes, []
        every = 1 + sum(len(process["age"]) for process in processes) // MOST_READINGS
        roles = sorted({name.split("/")[2] for name in metrics if name.startswith("perf/offload/")})
        own: Step = {
            "step": step,
            "seconds": round(metrics["timing_s/step"], 3),
            "is_first": self._steps == 0,
            "phases": [[name, *(round(at - began, 3) for at in ends)] for name, *ends in spans[:MOST_SPANS]],
            "processes": [_since(began, process, every) for process in processes],
            "copies": {role: {name: metrics[f"perf/offload/{role}/{name}"] for name in COPIES} for role in roles},
        }
        self._costs[min(self._steps, 1)].update(costs(own))
        self._steps += 1
        self._kept["last"] = own
        self._kept["slowest"] = max(self._kept.get("slowest", own), own, key=_pace)
        if time.monotonic() >= self._due_s:
            self.write()

    def costliest(self, config: PPOConfig, start_s: float) -> str:
        """Say what cost this process most, by its steps after the first one, if there are any; see `rlx.trainer.bottleneck`."""
        first, others = self._costs
        of_steps = costliest(others or first, max(1, self._steps - 1), config)
        if of_steps and start_s > first["step"] + others["step"]:
            return f"start-up, {duration(start_s)}, more than all steps, which a longer run pays once; then {of_steps}"
        return of_steps

    def write(self) -> None:
        """Replace the file, unless no step has ended. Raises StorageError."""
        if self._steps:
            began = time.monotonic()
            with storing(self._file), replacing_file(self._file) as file:
                json.dump(self._kept, file, separators=(",", ":"))
            self._due_s = time.monotonic() + max(WRITE_S, (time.monotonic() - began) / WRITE_SHARE)


def _pace(step: Step) -> tuple[bool, float]:
    """Order steps by their seconds without validation and checkpoint; the first ones of processes come before all others."""
    outside = sum(end - start for name, start, end in step["phases"] if name in OUTSIDE)
    return not step["is_first"], step["seconds"] - outside


def _since(began: float, process: Mapping[str, list[float]], every: int) -> dict[str, list[float]]:
    """Return every so many of a process's readings of the step that began then."""
    own = [index for index, at in enumerate(process["age"]) if at >= began][::every]
    rounded = {name: [round(values[index], 3) for index in own] for name, values in process.items() if name != "age"}
    return {"at": [round(process["age"][index] - began, 3) for index in own], **rounded}


def costs(step: Step) -> Counter[str]:
    """Return what a step cost.

    Returns:
        step, and the seconds of each phase by its name. Of the phase rollout `tail`, the last part, in which no process had more than
        TAIL_SHARE of its requests left; and of the time before it, as means over processes, `waiting`, with requests that waited for
        a place; `idle`, without any although samples were missing; `busy`, when the GPU was, and `known`, all for which that is known.
        `stall/<role>`: compute waited for offloading. All in seconds. `cpu`: above 0 if there is no GPU.
    """
    found = Counter[str]({"step": step["seconds"]})
    found.update({f"stall/{role}": copied["stall_ms"] / 1e3 for role, copied in step["copies"].items()})
    samplers = [process for process in step["processes"] if "engine 1 running" in process]
    found["cpu"] = sum("CPU busy" in process for process in step["processes"])
    for name, start, end in step["phases"]:
        found[name] += end - start
        if name != "rollout" or not samplers:
            continue
        full = start  # when the last process still had more requests than in its tail
        for process in samplers:
            parts = list(_parts(process, start, end))
            most = TAIL_SHARE * max((running for _, _, running, *_ in parts), default=0)
            first = min((since for since, _, running, *_ in parts if running > most), default=end)
            last = max((until for _, until, running, *_ in parts if running > most), default=start)
            full = max(full, last)
            for since, until, running, waiting, busy in parts:
                if first <= since < last:
                    seconds = (until - since) / len(samplers)
                    found.update(waiting=seconds * (waiting > 0), idle=seconds * (running + waiting == 0))
                    found.update(busy=seconds * busy, known=seconds * ("GPU busy" in process))
        found["tail"] += end - full
    return found


def _parts(process: Mapping[str, list[float]], start: float, end: float) -> Iterator[tuple[float, ...]]:
    """Yield from when to when how many requests ran and waited, and how busy the GPU was, in a part of a step."""
    counts = [
        [sum(each) for each in zip(*(own for name, own in process.items() if name.endswith(what)), strict=True)]
        for what in (" running", " waiting")
    ]
    busy = process.get("GPU busy", [0.0] * len(process["at"]))
    for (since, until), *values in zip(pairwise([*process["at"], end]), *counts, busy, strict=True):
        if max(since, start) < min(until, end):
            yield max(since, start), min(until, end), *values


class Lane(NamedTuple):
    """A row of a step's picture: bars with start, end, colour and name, or heights from 0 to 1, each from its time to the next."""

    label: str
    color: str = GREY
    bars: Sequence[tuple[float, float, str, str]] = ()
    times: Sequence[float] = ()
    heights: Sequence[float] = ()


class StepPicture(NamedTuple):
    """What to draw of a step."""

    title: str
    seconds: float
    lanes: list[Lane]


def pictures(kept: Mapping[str, Step]) -> list[StepPicture]:
    """Return the pictures of a file's steps; of one that is both last and slowest one picture."""
    names: dict[str, str] = {name: f"{name.capitalize()} step" for name in kept}
    if len(kept) == 2 and kept["last"]["step"] == kept["slowest"]["step"]:
        names = {"last": "Last and slowest step"}
    return [
        StepPicture(f"{shown} {kept[name]['step']}", kept[name]["seconds"], [*_lanes(kept[name])])
        for name, shown in names.items()
    ]


def _lanes(step: Step) -> Iterator[Lane]:
    """Yield the rows: phases, the readings of each process, and waits for offloading's copies."""
    bars = [
        (start, end, PHASES[name].color if name in PHASES else GREY, name.replace("_", " "))
        for name, start, end in step["phases"]
    ]
    yield Lane("phases", bars=bars)
    for number, process in enumerate(step["processes"], 1):
        for name, values in process.items():
            if name == "tokens":  # since the step began
                values = [max(0, value - values[0]) for value in values]
            if name != "at" and (most := max(values, default=0)) > 0:
                is_share = name.endswith("busy")
                label = f"process {number}, {name}{'' if is_share else f' (max {most:,.0f})'}"
                heights = [value / (1 if is_share else most) for value in values]
                yield Lane(label, GREEN if is_share else BLUE, (), process["at"], heights)
    for role, copied in step["copies"].items():
        out, both, disk = (copied[name] / 1e6 for name in COPIES[:3])
        stall_s, bars = copied["stall_ms"] / 1e3, []
        for name, start, end in step["phases"]:
            if name == f"update_{role}":
                bars.append((start, min(end, start + stall_s), RED, f"{role} waits for copies"))
                stall_s -= bars[-1][1] - start
        moved = f"{out:,.0f} MB out, {max(0, both - out):,.0f} in{f', disk {disk:,.0f}' if disk else ''}"
        yield Lane(f"{role} waits for copies: {moved}", bars=bars)


def read_timeline(path: Path) -> dict[str, Step]:
    """Return the `last` and the `slowest` step of a run; {} without a file. Raises TrackingError: it is none."""
    if not os.path.lexists(path):
        return {}
    fault = "is no regular file"  # a pipe would never end
    if path.is_file():
        try:
            kept = json.loads(path.read_bytes())
            for step in kept.values():
                _require_step(step)
            return {name: kept[name] for name in ("last", "slowest") if name in kept}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            fault = f"is no timeline ({type(error).__name__}: {error})"
    raise TrackingError(f"{path}: {fault}; remove it")


def _require_step(step: Step) -> None:
    """Raise TypeError, ValueError, KeyError or AttributeError unless this is a step as above."""
    numbers = [step["step"], step["seconds"]]
    for name, start, end in step["phases"]:
        numbers += [start, end, len(name.strip())]
    for process in step["processes"]:
        if not all(isinstance(values, list) and len(values) == len(process["at"]) for values in process.values()):
            raise ValueError("expected lists of one length in `processes`")
        numbers += [value for values in process.values() for value in values]
    numbers += [copied[name] for copied in step["copies"].values() for name in COPIES]
    if not all(type(each) in (int, float) and 0 <= each < 1 << 53 for each in numbers) or type(step["step"]) is not int:
        raise ValueError("expected numbers from 0 on")
    if type(step["is_first"]) is not bool:
        raise TypeError("expected true or false in `is_first`")
