"""The resources of a step: device memory that its layers may take, host memory, and the rates of link and disk."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlx.offload.autotune.layer_profile import PassState
from rlx.offload.autotune.op_profile import DeviceMemoryProbe
from rlx.offload.plan.costs import Budget
from rlx.offload.runtime.session import OffloadSession
from rlx.offload.storage.regions import size_bytes
from rlx.offload.storage.stats import measured_rate

logger = logging.getLogger("rlx.offload")

MARGIN = 0.05  # share of device memory that a plan leaves free
SPARE = MARGIN / 5  # of it may be taken by others before plans are made anew
LINK_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 1e9  # until copies have been timed


class Limits(NamedTuple):
    """The resources of one rank; None: not known, or no limit."""

    link_bytes_per_s: float | None
    device_bytes: int | None
    host_bytes: int | None
    disk_bytes_per_s: float | None


class StepLimits:
    """Finds the resources of this rank, from the statistics of the session, the model's parameters and the device."""

    def __init__(self, session: OffloadSession, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.room_bytes: int | None = None  # device memory for a step, the least found so far; None: not measured yet
        self.most_bytes: int | None = None  # set when the device has run out of memory
        self._session = session
        self._parameters = parameters
        self._spare_bytes = 0
        self._reserve_bytes = 0
        self._gradient_bytes: int | None = None  # of all gradients, as a rank holds them between steps
        self._has_noted_no_device = False

    def reserve(self, nbytes: int) -> None:
        """Note between steps that the next step will allocate and keep so much memory, apart from gradients."""
        self._reserve_bytes, self._gradient_bytes = nbytes, self._count_gradients()

    def pending_bytes(self) -> int:
        """Return the memory of gradients and other states that do not exist yet, and that a step will make and keep."""
        if any(parameter.grad is not None for parameter in self._parameters()):
            return self._reserve_bytes
        gradients = self._count_gradients() if self._gradient_bytes is None else self._gradient_bytes
        return self._reserve_bytes + gradients

    def gathered_bytes(self) -> int:
        """Return the memory of parameters that FSDP2 has gathered; 0 without FSDP2."""
        parameters = list(self._parameters())
        return sum(map(_own_bytes, filterfalse(_is_sharded, parameters))) if any(map(_is_sharded, parameters)) else 0

    def new_pass(self, is_warm_up: bool) -> PassState:
        """Return the state of a pass that begins."""
        is_sharded, gathered_bytes = any(map(_is_sharded, self._parameters())), self.gathered_bytes()
        return PassState(self._made_gradient_bytes, is_sharded, gathered_bytes, self.pending_bytes(), is_warm_up)

    def note_room(self, device: torch.device, baseline_bytes: int, pending_bytes: int) -> None:
        """Note how much memory a device has for the step, if `baseline_bytes` were allocated when its layers began."""
        if (capacity := DeviceMemoryProbe(device).capacity()) is not None:
            usable, total = capacity
            self._spare_bytes = int(SPARE * total)
            room = int(usable - MARGIN * total) - baseline_bytes - pending_bytes
            self.room_bytes = max(0, room if self.room_bytes is None else min(room, self.room_bytes))

    @property
    def uses_room(self) -> bool:
        """Whether plans may take all the room that the device has."""
        return self.room_bytes is not None and isinstance(self._session.options.max_device_bytes, str)

    def has_shrunk(self, device_bytes: int) -> bool:
        """Return whether the room has become much smaller than the `device_bytes` of a plan's budget."""
        return self.room_bytes is not None and device_bytes - self.room_bytes > self._spare_bytes

    def own(self) -> Limits:
        """Return the limits of this rank."""
        stats, options = self._session.stats(per_layer=False), self._session.options
        return Limits(
            link_bytes_per_s=measured_rate(stats.copied_bytes, stats.copy_ms),
            device_bytes=self.room_bytes if isinstance(options.max_device_bytes, str) else options.max_device_bytes,
            host_bytes=options.host_bytes,
            disk_bytes_per_s=measured_rate(stats.disk_bytes, stats.disk_ms),
        )

    def budget(self, ranks: Sequence[Limits]) -> Budget:
        """Return the smallest budget of any rank."""
        known = ([value for value in values if value is not None] for values in zip(*ranks, strict=True))
        links, devices, hosts, disks = known
        if not devices and not self._has_noted_no_device:
            self._has_noted_no_device = True
            logger.info(
                "activation offloading: there is no accelerator, so max_device_bytes='auto' keeps only what does not raise "
                "the peak; set a number of bytes to keep more"
            )
        device = min(devices, default=0)
        device = device if self.most_bytes is None else min(device, self.most_bytes)
        link = min(links, default=LINK_BYTES_PER_S)
        disk = min(disks, default=DISK_BYTES_PER_S) if self._session.options.uses_disk else 0.0
        return Budget(link, link, device, min(hosts, default=None), disk)

    def _count_gradients(self) -> int:
        return sum(_own_bytes(parameter) for parameter in self._parameters() if parameter.requires_grad)

    def _made_gradient_bytes(self) -> int:
        parameters = list(self._parameters())
        return made_gradient_bytes(list(filter(_is_sharded, parameters)) or parameters)


def made_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the device memory of the gradients that exist."""
    return sum(_own_bytes(parameter.grad) for parameter in parameters if parameter.grad is not None)


def gradient_counter(module: nn.Module | None) -> Callable[[], int]:
    """Return a function that returns the device memory of the gradients that a module's parameters have when it is called.

    It refers to neither of them: the parameters may be copies that are there during a pass alone.
    """
    if module is None:
        return lambda: 0
    reference = weakref.ref(module)

    def count() -> int:
        own = reference()
        return 0 if own is None else made_gradient_bytes(own.parameters())

    return count


def _is_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor, which FSDP2 has not gathered at the moment."""
    return hasattr(parameter, "to_local")


def _own_bytes(tensor: Tensor) -> int:
    """Return the device memory of a tensor, of this rank's shard if it is sharded; 0 on the CPU."""
    to_local = getattr(tensor, "to_local", None)
    return 0 if tensor.device.type == "cpu" else size_bytes(tensor if to_local is None else to_local())
