"""Measure the modes of a case: in each round every mode runs one step."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rlx.offload.benchmark.device import clean_up, clock
from rlx.offload.benchmark.entrant import Entrant
from rlx.offload.benchmark.models import VOCABULARY, Case, build, share
from rlx.offload.benchmark.modes import Mode, NotInstalledError
from rlx.offload.benchmark.ranks import Ranks
from rlx.offload.benchmark.results import CaseResult, HostMemoryUse, Row, engine_figures
from rlx.offload.storage.arena import host_arena

_MORE_PASSES = 8  # at most, for a mode that measures layers in several passes


class BenchmarkPlan(NamedTuple):
    """Modes, device and number of steps of a benchmark.

    Args:
        shape: configuration of the model.
        modes: in the order of the table.
        device: of this process.
        dtype: of the weights.
        rounds: largest number of timed steps per mode.
        seconds: no further round of a case begins after this time; None: all rounds run.
        warm_up: steps of each mode before timing; None: as many as the mode needs to reach its steady state.
        plain_layers: number of layers with which plain is measured and then scaled; None: all, or two if all do not fit.
        with_picture: record memory over a step and draw it.
        shard: shards each model over several processes; None: one process, in which the modes share one set of weights.
    """

    shape: dict[str, Any]
    modes: Sequence[Mode]
    device: torch.device
    dtype: torch.dtype
    rounds: int
    seconds: float | None
    warm_up: int | None
    plain_layers: int | None
    with_picture: bool
    shard: Callable[[nn.Module], nn.Module] | None = None


class CaseRun:
    """The measurement of one case.

    Args:
        plan: modes, device and number of steps.
        case: tokens and layers.
        ranks: the processes of the benchmark.
    """

    def __init__(self, plan: BenchmarkPlan, case: Case, ranks: Ranks) -> None:
        self._plan, self._case, self._ranks = plan, case, ranks
        self._arenas = [host_arena(pinned) for pinned in (True, False)]
        self._entrants: dict[str, Entrant] = {}
        self._notes: dict[str, str] = {}
        self._weights: nn.Module | None = None

    def run(self) -> CaseResult:
        """Warm every mode up, observe one step of each, then time steps in rounds."""
        start = time.perf_counter()
        self._ranks.say(f"case {self._case}")
        for mode in self._plan.modes:
            self._enter(mode)
        self._each("observe", lambda entrant: entrant.observed_step(self._plan.with_picture))
        allocations = self._allocations()
        measured_from = time.perf_counter()
        for number in range(self._plan.rounds):
            elapsed = max(self._ranks.gather(time.perf_counter() - measured_from))
            if number and self._plan.seconds is not None and elapsed > self._plan.seconds:
                break
            # The order alternates, so that a drift of the clock rate affects all modes alike.
            self._each(
                f"round {number + 1} of {self._plan.rounds}",
                lambda entrant: entrant.timed_step(self._ranks),
                reverse=number % 2 == 1,
            )
        host = self._host_memory(self._allocations() - allocations)
        rows = self._rows()
        self._entrants.clear()
        self._weights = None
        clean_up(self._plan.device)
        for arena in self._arenas:
            arena.trim()
        return CaseResult(self._case.tokens, self._case.layers, rows, host, time.perf_counter() - start)

    def _enter(self, mode: Mode) -> None:
        layers = self._case.layers
        if mode.kind == "plain" and self._plan.plain_layers is not None:
            layers = min(layers, self._plan.plain_layers)
        note = self._try(mode, layers)
        if note is not None and mode.kind == "plain" and "OutOfMemory" in note and layers > 2:
            layers = 2
            note = self._try(mode, layers)
        if note is None and layers < self._case.layers:
            self._notes[mode.name] = f"scaled from {layers} layers"
        elif note is not None:
            self._notes[mode.name] = note

    def _try(self, mode: Mode, layers: int) -> str | None:
        """Warm a mode up; return its error as text, or None."""
        start = time.perf_counter()

        def warm_up() -> None:
            entrant = self._entrants[mode.name] = Entrant(mode, self._model(layers), layers, self._ids())
            for _ in range(self._plan.warm_up or mode.warm_up):
                entrant.step()
            for _ in range(_MORE_PASSES):  # all ranks step, or none
                if self._plan.warm_up or not any(self._ranks.gather(entrant.is_measuring)):
                    break
                entrant.step()
            clock(self._plan.device)

        note = self._failure(warm_up)
        if note is not None:
            self._entrants.pop(mode.name, None)
            clean_up(self._plan.device)
        self._ranks.say(f"  warm-up {mode.name}: {note or f'{time.perf_counter() - start:.1f} s'}")
        return note

    def _each(self, what: str, run: Callable[[Entrant], None], reverse: bool = False) -> None:
        """Call `run` for every mode that has not failed; a mode that fails now is dropped."""
        start = time.perf_counter()
        names = list(self._entrants)
        for name in reversed(names) if reverse else names:
            note = self._failure(functools.partial(run, self._entrants[name]))
            if note is not None:
                self._notes[name] = note
                del self._entrants[name]
                clean_up(self._plan.device)
        self._ranks.say(f"  {what}: {time.perf_counter() - start:.1f} s")

    def _failure(self, run: Callable[[], None]) -> str | None:
        """Call `run` on all ranks; return the first rank's error as text, or None."""
        note = None
        try:
            run()
        except NotInstalledError as error:
            note = f"left out: {error}"
        except Exception as error:  # an error is the result of its mode
            note = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return next((found for found in self._ranks.gather(note) if found is not None), None)

    def _model(self, layers: int) -> nn.Module:
        """Return a model for one mode, with gradients that steps add to."""
        plan = self._plan
        if layers == self._case.layers and self._weights is not None:
            return share(self._weights)
        model = build(plan.shape, Case(self._case.tokens, layers), plan.device, plan.dtype)
        if plan.shard is not None:
            return plan.shard(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if layers == self._case.layers:
            self._weights = model
            return share(model)
        return model

    def _ids(self) -> torch.Tensor:
        vocabulary = self._plan.shape.get("vocab_size", VOCABULARY)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, min(vocabulary, VOCABULARY), (1, self._case.tokens), generator=generator)
        return ids.to(self._plan.device)

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
            step_s = [s * scale for s in self._ranks.largest(entrant.step_s)]
            fields: dict[str, Any] = {"layers": entrant.layers, "step_s": step_s}
            fields |= {"median_s": statistics.median(step_s), "min_s": min(step_s), "max_s": max(step_s)}
            if self._plan.device.type != "cpu" and scale == 1:
                fields["peak_bytes"] = max(self._ranks.gather(max(entrant.peaks)))
                fields["curve"] = entrant.curve
            handle = entrant.prepared.handle
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
        return [Row(mode.name, self._notes.get(mode.name), **measured.get(mode.name, {})) for mode in self._plan.modes]
