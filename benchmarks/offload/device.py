"""Memory and clock of a device; the CPU has no device memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.offload.results import MemoryCurve
from rlx.offload.runtime.pytree import tensors_in


def used_bytes(device: torch.device) -> int:
    """Return the bytes that tensors occupy on the device; 0 for the CPU."""
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Return the largest `used_bytes` since `reset_peak`; 0 for the CPU."""
    return 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Start a new peak measurement."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def clock(device: torch.device) -> float:
    """Wait until the device has done all queued work; return the time [s]."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def clean_up(device: torch.device) -> None:
    """Return unused device memory to the system."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


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
