"""The parts of a layer call's profile: its operations, the sizes of its inputs, the device's memory, times between marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.offload.storage.regions import is_parameter, is_plain, size_bytes, storage_address
from rlx.offload.storage.stats import Mark


@dataclass
class OpProfile:
    """One operation of a layer, for example attention or a linear map: when it ran, and the size of its result [bytes]."""

    name: str
    variant: str  # of attention: its kind, on which its time depends; else ""
    start: Mark
    stop: Mark | None = None
    stored: Mark | None = None  # when the last tensor of its result may be offloaded
    nbytes: int = 0
    small_bytes: int = 0  # of `nbytes`, in tensors too small to be offloaded
    extra_bytes: int = 0  # of `nbytes`, in tensors that autograd does not save
    summed_bytes: int = 0  # of its input, if its bias requires a gradient
    is_cacheable: bool = False  # its result can be cached
    slots: int = -1  # number of tensors that autograd had saved after it
    recomputed: tuple[Mark, Mark] | None = None  # begin and end in recomputation
    storages: dict[int, int] = field(default_factory=dict)  # of its result, during forward: addresses and bytes

    @property
    def seconds(self) -> float:
        """Time in forward."""
        assert self.stop is not None
        return seconds(self.start, self.stop)

    @property
    def recompute_s(self) -> float:
        """Time in recomputation. It differs from the time in forward, because other kernels run at the same time."""
        return self.seconds if self.recomputed is None else seconds(*self.recomputed)


class Inputs(NamedTuple):
    """Sizes of the tensors that a layer is called with [bytes]."""

    boundary_bytes: int  # of all that require a gradient, without parameters
    memory: dict[int, int]  # of the same tensors, by address of the storage
    shared: dict[int, int]  # of the others, likewise: all layers are called with them, so no layer is charged with them

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Inputs:
        """Return the sizes of these tensors."""
        own = {id(t): t for t in tensors if t.requires_grad and not is_parameter(t)}.values()
        return cls(
            sum(map(size_bytes, own)),
            {storage_address(t): size_bytes(t) for t in own if is_plain(t)},
            {storage_address(t): size_bytes(t) for t in tensors if not t.requires_grad and is_plain(t)},
        )


class DeviceMemoryProbe:
    """Reads a device's memory from torch's allocator; on the CPU all figures are 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def look(self) -> tuple[int, int]:
        """Return allocated bytes, and their peak since the last reset."""
        if self._device.type == "cpu":
            return 0, 0
        return torch.accelerator.memory_allocated(self._device), torch.accelerator.max_memory_allocated(self._device)

    def capacity(self) -> tuple[int, int] | None:
        """Return the bytes that torch has or could get, and all bytes of the device; None on the CPU."""
        if self._device.type == "cpu":
            return None
        free, total = torch.get_device_module(self._device.type).mem_get_info(self._device)
        return free + torch.accelerator.memory_reserved(self._device), total

    def reset(self) -> None:
        """Reset the peak."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)


def is_passed(mark: Mark) -> bool:
    """Return whether a device has passed a mark; False on the CPU, which is never behind."""
    return isinstance(mark, torch.Event) and mark.query()


def seconds(start: Mark, stop: Mark) -> float:
    """Return the time between two marks that the device has passed."""
    if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
        return start.elapsed_time(stop) / 1e3
    assert isinstance(start, float) and isinstance(stop, float)
    return (stop - start) / 1e3
