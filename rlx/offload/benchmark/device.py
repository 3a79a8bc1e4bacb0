"""Memory and clock of a device; the CPU has no device memory."""

from __future__ import annotations

import gc
import time

import torch


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


def name_of(device: torch.device) -> str:
    """Return the name of the device."""
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device.type).get_device_name(device))


def clean_up(device: torch.device) -> None:
    """Return unused device memory to the system."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
