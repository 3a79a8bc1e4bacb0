"""Device memory over one step, sampled before and after each module."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlx.offload.benchmark.device import clock, peak_bytes, reset_peak, used_bytes
from rlx.offload.benchmark.results import MemoryCurve
from rlx.offload.runtime.pytree import tensors_in


class _Sampler:
    """Records peak memory since the last sample, and the time without the time that sampling takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used_before = used_bytes(device)
        self._own_s = 0.0
        self._start = clock(device)
        self.seconds: list[float] = []
        self.used: list[int] = []
        reset_peak(device)

    def sample(self, *_: Any) -> None:
        # Wait for compute only: waiting for copies as well would change the step.
        torch.accelerator.current_stream(self._device).synchronize()
        now = time.perf_counter()
        self.seconds.append(round(now - self._start - self._own_s, 6))
        self.used.append(peak_bytes(self._device) - self._used_before)
        reset_peak(self._device)
        self._own_s += time.perf_counter() - now

    def sample_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.sample()
        for tensor in tensors_in(dict(output) if hasattr(output, "to_tuple") else output):
            if tensor.requires_grad:
                tensor.register_hook(self.sample)  # type: ignore[no-untyped-call]


def memory_curve(model: nn.Module, device: torch.device, step: Callable[[], None]) -> MemoryCurve:
    """Run a step on an accelerator and record its memory above the memory in use before it.

    Samples are taken before and after every module's forward, recomputation included, and when the gradient of its output is
    ready. Only hooks on modules and gradients are used, so that the step saves the same tensors as without them.
    """
    sampler = _Sampler(device)
    hooks = [module.register_forward_pre_hook(sampler.sample) for module in model.modules()]
    hooks += [module.register_forward_hook(sampler.sample_output) for module in model.modules()]
    try:
        step()
        sampler.sample()
    finally:
        for hook in hooks:
            hook.remove()
    return MemoryCurve(sampler.seconds, sampler.used)
