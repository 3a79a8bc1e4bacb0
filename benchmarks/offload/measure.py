"""A benchmark: in each case, every round runs one step of every mode."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.offload.device import clean_up, clock, memory_curve, peak_bytes, reset_peak, used_bytes
from benchmarks.offload.models import VOCABULARY, Case, build, build_quantized, share
from benchmarks.offload.modes import Mode, NotInstalledError
from benchmarks.offload.picture import draw
from benchmarks.offload.results import CaseResult, HostMemoryUse, MemoryCurve, Row, engine_figures, table, write_json
from rlx.offload.storage.arena import host_arena
from rlx.offload.storage.stats import OffloadStats


class Ranks:
    """The processes that run the same steps: of a group with a backend for host memory, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.is_first = group is None or dist.get_rank(group) == 0

    def say(self, text: str) -> None:
        """Print a line, on the first process only."""
        if self.is_first:
            print(text, flush=True)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._group is not None:
            dist.barrier(self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


_MORE_PASSES = 8  # at most, for a mode that measures layers in several passes


class Benchmark(NamedTuple):
    """A benchmark as the user asked for it."""

    shape: dict[str, Any]  # configuration of the model
    modes: Sequence[Mode]  # in the order of the table
    cases: Sequence[Case]  # measured one after the other
    device: torch.device  # of this process
    dtype: torch.dtype  # of the weights
    rounds: int  # largest number of timed steps per mode
    seconds: float | None  # no further round of a case begins after this time; None: all rounds run
    warm_up: int | None  # steps of each mode before timing; None: as many as it needs to reach its steady state
    plain_layers: int | None  # number with which plain is measured and then scaled; None: all, or two if all do not fit
    with_picture: bool  # record memory over a step and draw it
    title: str  # of the pictures
    about: dict[str, Any]  # further content of the JSON file
    folder: Path  # an existing one, for the files
    # Makes each mode's own model of a fresh one: shards it, or adds adapters. None: the modes share one set of weights.
    adapt: Callable[[nn.Module], nn.Module] | None = None
    is_quantized: bool = False  # weights of layers are in NF4

    def run(self, ranks: Ranks) -> bool:
        """Measure all cases; the first process reports. Return whether at least one mode was measured in each case."""
        results: list[CaseResult] = []
        files = [self.folder / "results.json"]
        for case in self.cases:
            result = CaseRun(self, case, ranks).run()
            results.append(result)
            if ranks.is_first:
                ranks.say(f"\n{table(result)}\n")
                # After each case, so that an interrupted run leaves the results so far.
                write_json(files[0], self.about, results)
                files += self._picture(result, ranks)
        ranks.say("written: " + ", ".join(map(str, files)))
        return all(any(row.median_s is not None for row in result.rows) for result in results)

    def _picture(self, result: CaseResult, ranks: Ranks) -> list[Path]:
        if not self.with_picture or all(row.median_s is None for row in result.rows):
            return []
        if self.device.type == "cpu":
            ranks.say("the picture shows no device memory: the CPU has none of its own")
        path = self.folder / f"{result.tokens}x{result.layers}.png"
        try:
            draw(path, self.title, result)
        except ImportError as error:
            ranks.say(f"no picture: {error}")
            return []
        return [path]


class Entrant:
    """One mode on its own model, switched on during the whole case."""

    def __init__(self, mode: Mode, model: nn.Module, layers: int, ids: torch.Tensor) -> None:
        self.layers = layers
        self.step_s: list[float] = []
        self.peaks: list[int] = []
        self.curve: MemoryCurve | None = None
        self.held_bytes = 0
        self.before = OffloadStats()
        self.streamed_before = OffloadStats()
        self.standing_bytes = 0  # weights, gradients and what remains between steps
        self._model, self._ids, self._kind = model, ids, mode.kind
        self.prepared = mode.prepare(model)

    @property
    def is_measuring(self) -> bool:
        """Whether `auto` still measures layers, so that its steps are not yet typical."""
        handle = self.prepared.handle
        return self._kind == "auto" and handle is not None and handle.plan() is None

    def step(self, at_end_of_forward: Callable[[], None] = lambda: None) -> None:
        """Run forward and backward; gradients are added to the existing ones."""
        with self.prepared.around_step():
            with self.prepared.around_forward():
                output = self._model(input_ids=self._ids).last_hidden_state
            at_end_of_forward()
            output.backward(torch.ones_like(output))

    def timed_step(self, ranks: Ranks) -> None:
        """Run a step and record its time and its peak memory."""
        device = self._ids.device
        used = used_bytes(device)
        reset_peak(device)
        ranks.barrier()
        start = clock(device)
        self.step()
        self.step_s.append(clock(device) - start)
        self.peaks.append(peak_bytes(device) - used)

    def observed_step(self, with_curve: bool) -> None:
        """Run a step and record its offloaded bytes and, `with_curve`, its device memory over time."""
        handle = self.prepared.handle

        def look() -> None:
            if handle is not None:
                self.held_bytes = handle.stats().held_bytes

        if with_curve and self._ids.device.type != "cpu":
            self.curve = memory_curve(self._model, self._ids.device, lambda: self.step(look))
        else:
            self.step(look)
        clock(self._ids.device)
        if handle is not None:
            self.before = handle.stats()
        if self.prepared.streaming is not None:
            self.streamed_before = self.prepared.streaming.stats()


class CaseRun:
    """The measurement of one case."""

    def __init__(self, benchmark: Benchmark, case: Case, ranks: Ranks) -> None:
        self._benchmark, self._case, self._ranks = benchmark, case, ranks
        self._arenas = [host_arena(pinned) for pinned in (True, False)]
        self._entrants: dict[str, Entrant] = {}
        self._notes: dict[str, str] = {}
        self._weights: nn.Module | None = None

    def run(self) -> CaseResult:
        """Warm every mode up, observe one step of each, then time steps in rounds."""
        start = time.perf_counter()
        self._ranks.say(f"case {self._case}")
        for mode in self._benchmark.modes:
            self._enter(mode)
        self._each("observe", lambda entrant: entrant.observed_step(self._benchmark.with_picture))
        allocations = self._allocations()
        measured_from = time.perf_counter()
        for number in range(self._benchmark.rounds):
            elapsed = max(self._ranks.gather(time.perf_counter() - measured_from))
            if number and self._benchmark.seconds is not None and elapsed > self._benchmark.seconds:
                break
            # The order alternates, so that a drift of the clock rate affects all modes alike.
            self._each(
                f"round {number + 1} of {self._benchmark.rounds}",
                lambda entrant: entrant.timed_step(self._ranks),
                reverse=number % 2 == 1,
            )
        host = self._host_memory(self._allocations() - allocations)
        rows = self._rows()
        self._entrants.clear()
        self._weights = None
        clean_up(self._benchmark.device)
        for arena in self._arenas:
            arena.trim()
        return CaseResult(*self._case, rows, host, time.perf_counter() - start)

    def _enter(self, mode: Mode) -> None:
        layers = self._case.layers
        if mode.kind == "plain" and self._benchmark.plain_layers is not None:
            layers = min(layers, self._benchmark.plain_layers)
        note = self._try(mode, layers)
        if note is not None and mode.kind == "plain" and "OutOfMemory" in note and layers > 2:
            layers = 2
            note = self._try(mode, layers)
        if note is None and layers < self._case.layers:
            note = f"scaled from {layers} layers"
        if note is not None:
            self._notes[mode.name] = note

    def _try(self, mode: Mode, layers: int) -> str | None:
        """Warm a mode up; return its error as text, or None."""
        start, steps = time.perf_counter(), self._benchmark.warm_up

        def warm_up() -> None:
            used = used_bytes(self._benchmark.device)
            entrant = self._entrants[mode.name] = Entrant(mode, self._model(layers), layers, self._ids())
            for _ in range(steps or mode.warm_up):
                entrant.step()
            for _ in range(_MORE_PASSES):  # all ranks step, or none
                if steps or not any(self._ranks.gather(entrant.is_measuring)):
                    break
                entrant.step()
            clock(self._benchmark.device)
            entrant.standing_bytes = used_bytes(self._benchmark.device) - used

        note = self._failure(mode.name, warm_up)
        self._ranks.say(f"  warm-up {mode.name}: {note or f'{time.perf_counter() - start:.1f} s'}")
        return note

    def _each(self, what: str, run: Callable[[Entrant], None], reverse: bool = False) -> None:
        """Call `run` for every mode that has not failed; a mode that fails now is dropped."""
        start = time.perf_counter()
        names = list(self._entrants)
        for name in reversed(names) if reverse else names:
            note = self._failure(name, functools.partial(run, self._entrants[name]))
            if note is not None:
                self._notes[name] = note
        self._ranks.say(f"  {what}: {time.perf_counter() - start:.1f} s")

    def _failure(self, name: str, run: Callable[[], None]) -> str | None:
        """Call `run` on all ranks. If a rank fails, drop the mode of that name and return the first rank's error as text."""
        note = None
        try:
            run()
        except NotInstalledError as error:
            note = f"left out: {error}"
        except Exception as error:  # an error is the result of its mode
            note = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        note = next((found for found in self._ranks.gather(note) if found is not None), None)
        if note is not None:
            self._entrants.pop(name, None)
            clean_up(self._benchmark.device)
        return note

    def _model(self, layers: int) -> nn.Module:
        """Return a model for one mode, with gradients that steps add to."""
        benchmark = self._benchmark
        if layers == self._case.layers and self._weights is not None:
            return share(self._weights)
        make = build_quantized if benchmark.is_quantized else build
        model = make(benchmark.shape, self._case._replace(layers=layers), benchmark.device, benchmark.dtype)
        if benchmark.adapt is not None:
            return benchmark.adapt(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if layers == self._case.layers:
            self._weights = model
            return share(model)
        return model

    def _ids(self) -> torch.Tensor:
        vocabulary = min(self._benchmark.shape.get("vocab_size", VOCABULARY), VOCABULARY)
        ids = torch.randint(0, vocabulary, (1, self._case.tokens), generator=torch.Generator().manual_seed(1))
        return ids.to(self._benchmark.device)

    def _allocations(self) -> int:
        return sum(arena.allocations for arena in self._arenas)

    def _host_memory(self, allocations: int) -> HostMemoryUse:
        reserved = sum(arena.reserved_bytes for arena in self._arenas)
        entrants = self._entrants.values()
        handles = [entrant.prepared.handle for entrant in entrants if entrant.prepared.handle is not None]
        on_disk = max((handle.stats().disk_reserved_bytes for handle in handles), default=0)
        held = max((entrant.held_bytes for entrant in entrants), default=0)
        return HostMemoryUse(reserved, on_disk, held, (reserved + on_disk) / held if held else None, allocations)

    def _rows(self) -> list[Row]:
        measured: dict[str, dict[str, Any]] = {}
        for name, entrant in self._entrants.items():
            scale = self._case.layers / entrant.layers
            of_ranks = self._ranks.gather(entrant.step_s)
            step_s = [max(times) * scale for times in zip(*of_ranks, strict=True)]  # of the slowest rank
            fields: dict[str, Any] = {"layers": entrant.layers, "step_s": step_s}
            fields |= {"median_s": statistics.median(step_s), "min_s": min(step_s), "max_s": max(step_s)}
            if self._benchmark.device.type != "cpu" and scale == 1:
                fields["peak_bytes"] = max(self._ranks.gather(max(entrant.peaks)))
                fields["curve"] = entrant.curve
                if self._benchmark.adapt is not None:
                    fields["standing_bytes"] = max(self._ranks.gather(entrant.standing_bytes))
            handle = entrant.prepared.handle
            streaming = entrant.prepared.streaming
            if streaming is not None:
                fields["streamed_bytes"] = streaming.streamed_bytes
                stats = streaming.stats().since(entrant.streamed_before)
                fields["streaming_stall_ms_per_step"] = stats.stall_ms / len(entrant.step_s)
            if handle is not None:
                stats = handle.stats().since(entrant.before)
                fields["held_bytes"] = entrant.held_bytes
                fields |= engine_figures(stats, len(entrant.step_s), fields["median_s"])
                plan = handle.plan()
                if plan is not None:
                    fields["predicted_s"] = plan.prediction.step_s
                    fields["predicted_peak_bytes"] = plan.prediction.peak_bytes
            measured[name] = fields
        for base in {"plain", "checkpointing"} & set(measured):
            for fields in measured.values():
                fields[f"ratio_to_{base}"] = fields["median_s"] / measured[base]["median_s"]
        modes = self._benchmark.modes
        return [Row(mode.name, self._notes.get(mode.name), **measured.get(mode.name, {})) for mode in modes]
