"""Measure the memory in use before and after each kind of call."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the memory in use now [10^9 bytes].

    Args:
        device: of this process.

    Returns:
        gb: on CUDA everything in use on the device by torch, a sampler with an allocator of its own, CUDA itself and other
        processes; on CPU the resident size of this process. allocated_gb, on CUDA only: the part in torch's tensors.
    """
    if device.type == "cpu":
        return {"gb": psutil.Process().memory_info().rss / 1e9}
    free, total = torch.cuda.mem_get_info(device)
    return {"gb": (total - free) / 1e9, "allocated_gb": torch.accelerator.memory_allocated(device) / 1e9}


class MemoryLog:
    """Records memory before the first and after the last of consecutive calls of one name.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._figures: dict[str, float] = {}
        self._last = ""

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Record the memory in use before and after a block of code."""
        if name != self._last:
            self._note(f"{name}_before")
        self._last = name
        yield
        self._note(f"{name}_after")

    def take(self) -> dict[str, float]:
        """Return `<name>_before_gb`, `<name>_after_gb` and so on for the last run of calls of each name, and start anew."""
        figures, self._figures, self._last = self._figures, {}, ""
        return figures

    def _note(self, moment: str) -> None:
        for figure, value in memory_in_use(self._device).items():
            self._figures[f"{moment}_{figure}"] = value
