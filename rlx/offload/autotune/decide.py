"""Decides for `save="auto"`: the first passes of each length are measured (`measure.py`), later ones follow a plan.

Lengths are grouped into buckets, each 1.25 times as long as the one before; a bucket has one profile and one plan. The passes after a
measured one run as with `save="boundary"` until the device has finished it. The very first pass chooses kernels, so it is not measured.

Note [states that come later]
With gradient accumulation, passes are planned before the optimizer's first step makes its states. So each planned pass looks at what is
free when it begins. If that is much less than the plan's budget, the pass is replanned from the same profile.

Note [ranks plan by themselves]
Ranks have different lengths and measure different times, so their plans differ. That changes no result. It would only matter to
communication in a layer's forward, which a recomputation repeats. So a model with such layers gets no plan.

Note [a device that waits for the host]
The host needs about as long to profile a layer as the device needs to compute it with a few thousand tokens. If the device waits, calls
look slower than they are. So if it may have waited in most layers of a pass, the next four passes profile a quarter of the layers each;
in the layers between them the host gets ahead. Times of layers that may have waited are ignored.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import filterfalse

import torch
from torch import Tensor, nn

from rlx.offload.autotune.measure import (
    Inputs,
    LayerProfile,
    PassProfile,
    PassState,
    allocated_bytes,
    capacity_bytes,
    measured,
    planned,
)
from rlx.offload.plan.costs import Budget
from rlx.offload.plan.explain import explain
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.replay.recorder import LayerInstructions
from rlx.offload.runtime.layers import fsdp_kinds
from rlx.offload.runtime.session import Layer, OffloadSession
from rlx.offload.storage.stats import measured_rate
from rlx.offload.storage.tensor_bytes import size_bytes

logger = logging.getLogger("rlx.offload")

BUCKET_RATIO = 1.25  # the longest over the shortest length that share a plan
LAYER_STRIDE = 4  # a pass profiles one of this many layers (Note [a device that waits for the host])
MARGIN = 0.05  # share of device memory that a plan leaves free
SPARE = MARGIN / 5  # of it may be taken by others before replanning
LINK_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 1e9  # until copies have been timed


class LengthBucket:
    """The passes of one length on one device, their profile and the plan made from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.plan: Plan | None = None
        self.instructions: dict[int, LayerInstructions] = {}
        self.profile: PassProfile | None = None
        self.device_bytes = 0  # in the budget of the plan
        self.passes = 0
        self.last_index = -1  # of the layer called last
        self.is_measuring = False
        self.state = PassState()  # of the pass that was profiled last
        # Passes that have profiled a part of the layers, and these layers (Note [a device that waits for the host]).
        self._sampled_passes: int | None = None
        self._sampled_layers: dict[int, LayerProfile] = {}

    def sees_calls(self, layer_index: int) -> bool:
        return self._sampled_passes is None or layer_index % LAYER_STRIDE == self._sampled_passes % LAYER_STRIDE

    def begin_measuring(self, state: PassState) -> None:
        """Begin to profile a pass, unless the graph of a profiled pass is alive or the device has not finished that pass."""
        self.is_measuring = not self.state.is_alive and not self.state.is_complete
        if self.is_measuring:
            self.state = state

    def take(self) -> bool:
        """Take the profile of a pass, after all its layers were recomputed and the device has finished them; else False."""
        state = self.state
        if self.profile is not None or not state.is_complete:
            return False
        if not all(layer.is_known for layer in state.done.values()):
            return False
        found, self.is_measuring = dict(state.done), False
        for layers in (state.called, state.begun, state.done):
            layers.clear()
        host_bound = sum(layer.is_host_bound for layer in found.values())
        if self._sampled_passes is None and 2 * host_bound > len(found):
            self._sampled_passes = 0
            return False
        if self._sampled_passes is not None:
            self._sampled_passes += 1
            self._sampled_layers |= {index: layer for index, layer in found.items() if layer.sees_calls}
            if not self._sampled_layers.keys() >= found.keys():
                return False
            found, self._sampled_layers, self._sampled_passes = self._sampled_layers, {}, None
        self.profile = measured([found[index] for index in sorted(found)], state.loss_bytes, state.loss_s)
        return True


class PlanController:
    """Gives each layer call its policy."""

    def __init__(self, session: OffloadSession, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.plan: Plan | None = None  # of the latest planned pass
        self.limits = StepLimits(session, parameters)
        self._session = session
        self._known_layers: set[int] = set()  # layers that have been called
        self._last: LengthBucket | None = None
        self._buckets: dict[tuple[torch.device, int], LengthBucket] = {}
        self._is_warm = self._is_declined = False

    def decide(
        self, layer: Layer, module: nn.Module, tensors: Sequence[Tensor]
    ) -> LayerInstructions | LayerProfile | None:
        """Return the plan's instructions for a layer call, or a profile that measures it; None: boundary mode."""
        sizes = [(size_bytes(tensor), tensor.device) for tensor in tensors if tensor.is_floating_point()]
        if self._is_declined or not sizes:
            return None
        longest, device = max(sizes, key=lambda pair: pair[0])
        if layer.index not in self._known_layers:
            self._known_layers.add(layer.index)
            if has_collectives(module):
                self._decline(layer)
                return None
        key = device, round(math.log(max(longest, 1)) / math.log(BUCKET_RATIO))
        bucket = self._buckets.get(key) or self._buckets.setdefault(key, LengthBucket(device))
        if layer.index <= bucket.last_index or not bucket.passes:
            self._begin_pass(bucket, tensors)
        bucket.last_index = layer.index
        if bucket.plan is not None:
            return bucket.instructions.get(layer.index)
        if not bucket.is_measuring or layer.index in bucket.state.called:
            return None
        # Gradients of parameters that FSDP2 has gathered are freed within the pass, so none of them is counted.
        counted = None if bucket.state.is_sharded else module
        profile = LayerProfile(
            layer.index,
            device,
            Inputs.of(tensors),
            bucket.state,
            self._session.options.min_bytes,
            gradient_bytes=gradient_counter(counted),
            sees_calls=bucket.sees_calls(layer.index),
        )
        bucket.state.called.add(layer.index)
        bucket.state.begun[layer.index] = profile
        return profile

    def measurement(self) -> PassProfile | None:
        if self._last is not None:
            self._collect(self._last)
        return None if self._last is None else self._last.profile

    def _begin_pass(self, bucket: LengthBucket, tensors: Sequence[Tensor]) -> None:
        bucket.passes += 1
        self._is_warm = self._is_warm or bucket.passes > 1
        self._last = bucket
        self._collect(bucket)
        if bucket.plan is not None and isinstance(self._session.options.max_device_bytes, str):
            inputs = Inputs.of(tensors)
            own_bytes = sum(inputs.memory.values()) + sum(inputs.shared.values()) + self.limits.gathered_bytes()
            baseline_bytes = max(0, allocated_bytes(bucket.device)[0] - own_bytes)
            self.limits.note_room(bucket.device, baseline_bytes, self.limits.pending_bytes())
            if self.limits.has_shrunk(bucket.device_bytes):  # Note [states that come later]
                bucket.plan = None
        if bucket.plan is None and bucket.profile is not None:
            self._make_plan(bucket, bucket.profile)
        elif bucket.plan is None and self._is_warm:
            bucket.begin_measuring(self.limits.new_pass())
        self.plan = bucket.plan or self.plan

    def _collect(self, bucket: LengthBucket) -> None:
        if bucket.take():
            self.limits.note_room(bucket.device, bucket.state.baseline_bytes, bucket.state.pending_bytes)

    def _make_plan(self, bucket: LengthBucket, profile: PassProfile) -> None:
        kinds = [planned(kind) for kind in profile.kinds]
        of_layer = {index: kind for kind in kinds for index in kind.members}
        indices = sorted(of_layer)
        costs = [of_layer[index].cost for index in indices]
        budget = replace(self.limits.budget(), loss_s=profile.loss_s, loss_bytes=profile.loss_bytes)
        plan = make_plan(costs, budget)
        bucket.instructions = {
            index: of_layer[index].instructions(layer, fetch)
            for index, layer, fetch in zip(indices, plan.layers, plan.fetches, strict=True)
        }
        bucket.plan, bucket.device_bytes = plan, budget.device_bytes
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "activation offloading: plan for layers with inputs of %d bytes\n%s",
                max(cost.boundary_bytes for cost in costs),
                explain(costs, plan, budget),
            )

    def _decline(self, layer: Layer) -> None:
        self._is_declined = True
        logger.info(
            "activation offloading: layer %s communicates inside its forward, so that ranks must recompute alike; "
            "save='auto' offloads inputs only, as 'boundary' does",
            layer.name,
        )


def has_collectives(module: nn.Module) -> bool:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    has_units = any(isinstance(child, fsdp_kinds()) for child in module.modules() if child is not module)
    return has_units or any(isinstance(parameter, DTensor) for parameter in module.parameters())


class StepLimits:
    """Finds the resources of this rank, from the statistics of the session, the model's parameters and the device."""

    def __init__(self, session: OffloadSession, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.room_bytes: int | None = None  # device memory for a step, the least found so far; None: not measured yet
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
        parameters = list(self._parameters())
        return sum(map(_own_bytes, filterfalse(_is_sharded, parameters))) if any(map(_is_sharded, parameters)) else 0

    def new_pass(self) -> PassState:
        is_sharded, gathered_bytes = any(map(_is_sharded, self._parameters())), self.gathered_bytes()
        return PassState(self._made_gradient_bytes, is_sharded, gathered_bytes, self.pending_bytes())

    def note_room(self, device: torch.device, baseline_bytes: int, pending_bytes: int) -> None:
        """Note how much memory a device has for the step, if `baseline_bytes` were allocated when its layers began."""
        if (capacity := capacity_bytes(device)) is not None:
            usable, total = capacity
            self._spare_bytes = int(SPARE * total)
            room = int(usable - MARGIN * total) - baseline_bytes - pending_bytes
            self.room_bytes = max(0, room if self.room_bytes is None else min(room, self.room_bytes))

    def has_shrunk(self, device_bytes: int) -> bool:
        return self.room_bytes is not None and device_bytes - self.room_bytes > self._spare_bytes

    def budget(self) -> Budget:
        stats, options = self._session.stats(per_layer=False), self._session.options
        device = self.room_bytes if isinstance(options.max_device_bytes, str) else options.max_device_bytes
        if device is None and not self._has_noted_no_device:
            self._has_noted_no_device = True
            logger.info(
                "activation offloading: there is no accelerator, so max_device_bytes='auto' keeps only what does not raise "
                "the peak; set a number of bytes to keep more"
            )
        link = measured_rate(stats.copied_bytes, stats.copy_ms) or LINK_BYTES_PER_S
        disk = measured_rate(stats.disk_bytes, stats.disk_ms) or DISK_BYTES_PER_S
        return Budget(link, link, device or 0, options.host_bytes, disk if options.uses_disk else 0.0)

    def _count_gradients(self) -> int:
        return sum(_own_bytes(parameter) for parameter in self._parameters() if parameter.requires_grad)

    def _made_gradient_bytes(self) -> int:
        parameters = list(self._parameters())
        return made_gradient_bytes(list(filter(_is_sharded, parameters)) or parameters)


def made_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_own_bytes(parameter.grad) for parameter in parameters if parameter.grad is not None)


def gradient_counter(module: nn.Module | None) -> Callable[[], int]:
    """Return a function that returns the device memory of a module's gradients; it holds neither module nor parameters."""
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
