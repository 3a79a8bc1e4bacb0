"""`save="auto"`: layers are measured in the first pass of each length, and follow a plan from then on.

Lengths come in buckets, each a quarter longer than the one before. In a pass that is measured the inputs of layers leave and
the rest is recomputed, as in all passes until the device has passed what was measured; it is not waited for. The very first
pass, in which kernels are chosen and memory is taken, is not measured.

Note [ranks that agree]
Ranks have different lengths in one pass, and one of them a dummy; what one of them measures the others may not meet. So
nothing is exchanged inside a pass. Plans are made where the caller says that all ranks meet (`Controller.agree`), from all
that any of them has measured by then: for each length the slowest times, with the least of what any rank has to spend. All
ranks get the plans of all lengths. Until it is called each rank plans by itself and waits for nobody.
In both cases two ranks may recompute differently in the same pass, by length or by plan. So a layer that has communication
inside, which recomputation repeats, is not planned.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlx.offload.engine import Engine, Layer
from rlx.offload.flow import Proof
from rlx.offload.identity import is_parameter, is_plain, size_bytes, storage_address
from rlx.offload.measured import Measurement, measured, planned, slowest
from rlx.offload.orders import Orders
from rlx.offload.plan.costs import Machine
from rlx.offload.plan.explain import explain
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.sample import Backward, Sample

logger = logging.getLogger("rlx.offload")

BUCKET = 1.25  # the longest over the shortest length that share a plan
MARGIN = 0.05  # of device memory that a plan leaves free
LINK_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 1e9  # until copies have been timed
_TIMED_BYTES = 1 << 24  # copies of less than this tell nothing about the link

Key = tuple[int, int]  # of a bucket: which of the devices in use, and the logarithm of the length


class Bucket:
    """The passes of one length: what was measured, and the plan made of it."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.orders: dict[int, Orders] = {}
        self.measurement: Measurement | None = None
        self.passes = 0
        self.last_index = -1  # of the layer called last
        self.is_measuring = False
        self.backward = Backward()  # of the pass that was measured last
        self.coming_bytes = 0  # of states that did not exist in that pass
        self.called: set[int] = set()  # layers in that pass
        self.begun: weakref.WeakValueDictionary[int, Sample] = weakref.WeakValueDictionary()
        self.done: dict[int, Sample] = {}

    def begin_measuring(self, coming_bytes: int, gradient_bytes: Callable[[], int]) -> None:
        """Begin to measure, unless a graph that was measured is alive, or the device has not passed it."""
        is_alive = any(index not in self.done for index in self.begun)
        self.is_measuring = not is_alive and (not self.called or self.done.keys() != self.called)
        if self.is_measuring:
            self.backward, self.coming_bytes = Backward(gradient_bytes), coming_bytes
            self.called, self.done = set(), {}
            self.begun.clear()

    def finish(self, sample: Sample) -> None:
        """Note that a layer has been recomputed."""
        if self.begun.get(sample.index) is sample:
            self.done[sample.index] = sample

    def has_just_been_measured(self) -> bool:
        """Whether all that was called has been measured, and the device has passed it; True once."""
        if self.measurement is not None or not self.called or self.done.keys() != self.called:
            return False
        if not all(sample.is_known for sample in self.done.values()):
            return False
        samples, backward = [self.done[i] for i in sorted(self.done)], self.backward
        self.measurement = measured(samples, backward.outside_bytes, backward.turn_s)
        self.is_measuring = False
        self.begun.clear()
        self.done.clear()
        return True


class Means(NamedTuple):
    """What one rank has to spend; None: it does not know, or has no limit."""

    link_bytes_per_s: float | None
    device_bytes: int | None
    host_bytes: int | None
    disk_bytes_per_s: float | None


class Controller:
    """Says what each layer call is to do.

    Args:
        engine: of the handle.
        parameters: gives the model's.
    """

    def __init__(self, engine: Engine, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.plan: Plan | None = None  # of the latest pass that followed one
        self._engine = engine
        self._parameters = parameters
        self._devices: list[torch.device] = []
        self._buckets: dict[Key, Bucket] = {}
        self._is_warm = self._is_declined = self._has_noted_no_device = False
        self._agrees = False  # plans are made in `agree` only
        self._explains = True
        self._reserve_bytes = 0
        self._gradient_bytes: int | None = None  # of all of them, as a rank holds them between steps
        self._room_bytes: int | None = None  # the least that was found, where it is not the user who says how much
        self._limit_bytes: int | None = None  # since the device ran out of memory

    def orders(self, layer: Layer, module: nn.Module, tensors: Sequence[Tensor]) -> Orders | None:
        """What a layer is to do with these inputs; None: send them off and be recomputed."""
        sizes = [(size_bytes(tensor), tensor.device) for tensor in tensors if tensor.is_floating_point()]
        if self._is_declined or not sizes:
            return None
        longest, device = max(sizes, key=lambda pair: pair[0])
        if device not in self._devices:
            self._devices.append(device)
        key = (self._devices.index(device), round(math.log(max(longest, 1)) / math.log(BUCKET)))
        bucket = self._buckets.get(key) or self._buckets.setdefault(key, Bucket())
        if layer.index <= bucket.last_index or not bucket.passes:
            self._begin_pass(bucket, device)
        bucket.last_index = layer.index
        if bucket.plan is not None:
            return bucket.orders.get(layer.index)
        if not bucket.is_measuring or layer.index in bucket.called:
            return None
        if has_collectives(module):
            self._decline(layer)
            return None
        bucket.called.add(layer.index)
        own = [t for t in tensors if t.requires_grad and not is_parameter(t)]
        inputs = {id(t): size_bytes(t) for t in own}
        memory = {storage_address(t): size_bytes(t) for t in own if is_plain(t)}
        shared = {storage_address(t): size_bytes(t) for t in tensors if not t.requires_grad and is_plain(t)}
        boundary, min_bytes = sum(inputs.values()), self._engine.options.min_bytes
        sample = Sample(
            layer.index,
            device,
            boundary,
            bucket.backward,
            bucket.finish,
            shared,
            min_bytes,
            inputs=memory,
            gradient_bytes=partial(_made_gradient_bytes, tuple(module.parameters())),
        )
        bucket.begun[layer.index] = sample
        return Orders(sample=sample)

    def agree(self, group: dist.ProcessGroup | None, reserve_bytes: int) -> None:
        """Make the plans of all lengths that a rank has measured, together with all ranks of a group.

        Args:
            group: None: the default one, or this process alone where there is none.
            reserve_bytes: that this rank will take for good in its next step, gradients aside.
        """
        for key, bucket in self._buckets.items():
            self._look_at(bucket, self._devices[key[0]])
            if not self._agrees:
                bucket.plan = None
        self._agrees, self._reserve_bytes, self._gradient_bytes = True, reserve_bytes, self._count_gradients()
        own = {key: b.measurement for key, b in self._buckets.items() if b.plan is None and b.measurement is not None}
        ranks: list[tuple[dict[Key, Measurement], Means]] = [(own, self._means())]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            self._explains = dist.get_rank(group) == 0
            ranks = ranks * dist.get_world_size(group)
            dist.all_gather_object(ranks, (own, self._means()), group)
        machine = self._machine([means for _, means in ranks])
        for key in sorted({key for found, _ in ranks for key in found}):
            bucket = self._buckets.setdefault(key, Bucket())
            bucket.measurement = slowest([found[key] for found, _ in ranks if key in found])
            self._make_plan(bucket, bucket.measurement, machine)

    def limit(self, device_bytes: int) -> None:
        """Plan anew, with at most so much of the device."""
        self._limit_bytes = device_bytes
        self.plan = None
        for bucket in self._buckets.values():
            bucket.plan = None

    def _begin_pass(self, bucket: Bucket, device: torch.device) -> None:
        bucket.passes += 1
        self._is_warm = self._is_warm or bucket.passes > 1
        self._look_at(bucket, device)
        if bucket.plan is None and bucket.measurement is not None and not self._agrees:
            self._make_plan(bucket, bucket.measurement, self._machine([self._means()]))
        if bucket.plan is not None:
            self.plan = bucket.plan
        elif self._is_warm and bucket.measurement is None:
            bucket.begin_measuring(self._coming_bytes(), self._count_made_gradients)

    def _coming_bytes(self) -> int:
        """Gradients and other states that do not exist yet and will stay once they do."""
        if any(parameter.grad is not None for parameter in self._parameters()):
            return self._reserve_bytes
        gradients = self._count_gradients() if self._gradient_bytes is None else self._gradient_bytes
        return self._reserve_bytes + gradients

    def _count_gradients(self) -> int:
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        return sum(_own_bytes(parameter) for parameter in trained if parameter.device.type != "cpu")

    def _count_made_gradients(self) -> int:
        return _made_gradient_bytes(self._parameters())

    def _look_at(self, bucket: Bucket, device: torch.device) -> None:
        """Note what a pass has been measured to cost, and what room it has found on the device."""
        if bucket.has_just_been_measured() and device.type != "cpu":
            free, total = torch.get_device_module(device.type).mem_get_info(device)
            reach = free + torch.accelerator.memory_reserved(device)
            room = int(reach - MARGIN * total) - bucket.backward.begin_bytes - bucket.coming_bytes
            self._room_bytes = max(0, room if self._room_bytes is None else min(room, self._room_bytes))

    def _means(self) -> Means:
        stats, options = self._engine.stats(per_layer=False), self._engine.options
        budget = self._room_bytes if isinstance(options.max_device_bytes, str) else options.max_device_bytes
        return Means(
            link_bytes_per_s=_rate(stats.copied_bytes, stats.copy_ms),
            device_bytes=budget,
            host_bytes=options.host_bytes,
            disk_bytes_per_s=_rate(stats.disk_bytes, stats.disk_ms),
        )

    def _machine(self, ranks: Sequence[Means]) -> Machine:
        """The least of what any rank has."""
        known = ([value for value in values if value is not None] for values in zip(*ranks, strict=True))
        links, budgets, hosts, disks = known
        if not budgets and not self._has_noted_no_device:
            self._has_noted_no_device = True
            logger.info(
                "activation offloading: there is no accelerator, whose free memory max_device_bytes='auto' stands for: as "
                "little as possible stays; set a number of bytes to have more kept"
            )
        budget = min(budgets, default=0)
        budget = budget if self._limit_bytes is None else min(budget, self._limit_bytes)
        link = min(links, default=LINK_BYTES_PER_S)
        disk = min(disks, default=DISK_BYTES_PER_S) if self._engine.options.uses_disk else 0.0
        return Machine(link, link, budget, min(hosts, default=None), disk)

    def _make_plan(self, bucket: Bucket, measurement: Measurement, machine: Machine) -> None:
        kinds = [planned(kind) for kind in measurement.kinds]
        of_layer = {index: kind for kind in kinds for index in kind.members}
        indices = sorted(of_layer)
        costs = [of_layer[index].cost for index in indices]
        machine = replace(machine, turn_s=measurement.turn_s, turn_bytes=measurement.outside_bytes)
        plan = make_plan(costs, machine)
        bucket.orders.clear()
        proofs: dict[tuple[int, frozenset[int]], Proof] = {}
        for index, layer, fetch in zip(indices, plan.layers, plan.fetches, strict=True):
            bucket.orders[index] = of_layer[index].orders(layer, fetch, proofs)
        bucket.plan = plan
        if self._explains and logger.isEnabledFor(logging.INFO):
            logger.info(
                "activation offloading: plan for layers with inputs of %d bytes\n%s",
                max(cost.boundary_bytes for cost in costs),
                explain(costs, plan, machine),
            )

    def _decline(self, layer: Layer) -> None:
        self._is_declined = True
        logger.info(
            "activation offloading: layer %s communicates inside its forward, so that ranks must recompute alike; "
            "save='auto' sends off inputs only, as 'boundary' does",
            layer.name,
        )


def _rate(nbytes: int, ms: float) -> float | None:
    return nbytes / ms * 1e3 if nbytes >= _TIMED_BYTES and ms else None


def _made_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(_own_bytes(gradient) for gradient in gradients if gradient.device.type != "cpu")


def _own_bytes(parameter: Tensor) -> int:
    """Size of what this rank holds of a parameter that may be sharded."""
    own = getattr(parameter, "to_local", None)
    return size_bytes(parameter if own is None else own())


def has_collectives(module: nn.Module) -> bool:
    """Whether a layer communicates inside its forward: tensor-parallel weights, or units of FSDP inside."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    inner = [child for child in module.modules() if child is not module]
    has_units = any(isinstance(child, (FSDPModule, FullyShardedDataParallel)) for child in inner)
    return has_units or any(isinstance(parameter, DTensor) for parameter in module.parameters())
