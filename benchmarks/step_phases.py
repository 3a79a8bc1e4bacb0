"""Seconds and device memory of an optimizer step by phase."""

import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.offload.device import clock, peak_bytes, reset_peak
from rlx.engine.fsdp_units import local

STEP_PHASES = ("forward", "head", "backward", "step")
TIMES = ("forward", "head", "backward", "clip", "step")
Figures = dict[str, Any]


class PhaseTimes:
    """Seconds of the device's work by phase; on the CPU, which has no queue, seconds of the clock."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ends: list[tuple[str, torch.Event | float]] = []

    def begin(self) -> None:
        """Forget an earlier step."""
        self._ends = [("", self._now())]

    def end(self, phase: str) -> None:
        """End a phase: the device's work since the end of the last phase belongs to this one."""
        self._ends.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, after the device has finished."""
        found = dict.fromkeys(TIMES, 0.0)
        for (_, begun), (phase, ended) in pairwise(self._ends):
            if isinstance(begun, torch.Event):
                found[phase] += begun.elapsed_time(ended) / 1e3
            else:
                found[phase] += ended - begun  # type: ignore[operator]
        return found

    def _now(self) -> torch.Event | float:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


class PhasePeaks:
    """Largest device memory and time of each phase of a step: layers forward, the head both ways, layers backward, optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device):
        self.times = PhaseTimes(device)
        self.bytes: dict[str, int] = {}
        self.static: dict[str, int] = {}
        self._model, self._optimizer, self._device = model, optimizer, device
        head = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_pre_hook(self._before_head)
        model.get_input_embeddings().register_forward_hook(self._behind_embeddings)  # type: ignore[operator]
        optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def begin(self) -> None:
        """Forget an earlier step."""
        self.bytes.clear()
        reset_peak(self._device)
        self.times.begin()

    def _end(self, phase: str) -> None:
        self.times.end("clip" if phase == "backward" else phase)
        self.bytes[phase] = max(self.bytes.get(phase, 0), peak_bytes(self._device))
        reset_peak(self._device)

    def _before_head(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            self._end("forward")
            inputs[0].register_hook(lambda grad: self._end("head"))

    def _behind_embeddings(self, embeddings: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: self.times.end("backward"))

    def _before_step(self) -> None:
        if "backward" in self.bytes:  # a later piece of a step in pieces
            return
        self._end("backward")
        self.static["gradients"] = _nbytes((p.grad for p in self._model.parameters()), self._device)

    def finish(self) -> Figures:
        """Return all figures after the device has finished the step [bytes, seconds]."""
        self._end("step")
        state = (x for values in self._optimizer.state.values() for x in values.values())
        self.static["weights"] = _nbytes(self._model.parameters(), self._device)
        self.static["optimizer"] = _nbytes(state, self._device)
        clock(self._device)
        return {"static": dict(self.static), "peaks": dict(self.bytes), "times": self.times.seconds()}


def _nbytes(tensors: Iterable[Any], device: torch.device) -> int:
    own = [local(x) for x in tensors if isinstance(x, Tensor)]
    return sum(x.nbytes for x in own if x.device.type == device.type and x.untyped_storage().nbytes())
