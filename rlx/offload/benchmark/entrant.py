"""One mode in a measurement."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rlx.offload.benchmark.curve import memory_curve
from rlx.offload.benchmark.device import clock, peak_bytes, reset_peak, used_bytes
from rlx.offload.benchmark.modes import Mode
from rlx.offload.benchmark.ranks import Ranks
from rlx.offload.benchmark.results import MemoryCurve
from rlx.offload.storage.stats import OffloadStats


class Entrant:
    """One mode on its own model, switched on during the whole case."""

    def __init__(self, mode: Mode, model: nn.Module, layers: int, ids: torch.Tensor) -> None:
        self.layers = layers
        self.step_s: list[float] = []
        self.peaks: list[int] = []
        self.curve: MemoryCurve | None = None
        self.held_bytes = 0
        self.before = OffloadStats()
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
