"""Memory and clock of a device; the CPU has no memory of its own to watch."""

from __future__ import annotations

import gc
import time

import torch


def used_bytes(device: torch.device) -> int:
    """What tensors occupy on the device; 0 for the CPU."""
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The largest it has been since `reset_peak`; 0 for the CPU."""
    return 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Begin a new peak."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def clock(device: torch.device) -> float:
    """The time at which the device has done all it was given [s]."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device.type).get_device_name(device))


def clean_up(device: torch.device) -> None:
    """Give device memory that nothing uses back to the system."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
