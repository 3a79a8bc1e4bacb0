"""`save="auto"`: layers are measured in the first pass of each length, and follow a plan from then on.

Lengths come in buckets, each a quarter longer than the one before. In a pass that is measured the inputs of layers leave and
the rest is recomputed, as in all passes until the device has passed what was measured; it is not waited for. The very first
pass, in which kernels are chosen and memory is taken, is not measured.

Each rank plans by itself, from its own figures, so that nobody waits for another. Ranks may then differ in which layers they
recompute. So a layer that has communication inside, which recomputation repeats, is not planned.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor, nn

from rlx.offload.engine import Engine, Layer
from rlx.offload.identity import is_parameter, size_bytes
from rlx.offload.orders import Orders
from rlx.offload.plan.explain import explain
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import LayerCost, LayerPlan, Machine, Operation, predict
from rlx.offload.sample import Backward, Sample

logger = logging.getLogger("rlx.offload")

BUCKET = 1.25  # the longest over the shortest length that share a plan
MARGIN = 0.05  # of device memory that a plan leaves free
LINK_BYTES_PER_S = 25e9  # of the link until copies have been timed
_TIMED_BYTES = 1 << 24  # copies of less than this tell nothing about the link
_MAX_OPERATIONS = 12  # of a layer that are planned, the dearest first: the search takes time


class Bucket:
    """The passes of one length: what was measured, and the plan made of it."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.orders: dict[int, Orders] = {}
        self.passes = 0
        self.last_index = -1  # of the layer called last
        self.is_measuring = False
        self.backward = Backward()  # of the pass that was measured last
        self.called: set[int] = set()  # layers in that pass
        self.begun: weakref.WeakValueDictionary[int, Sample] = weakref.WeakValueDictionary()
        self.done: dict[int, Sample] = {}

    def begin_measuring(self) -> None:
        """Begin to measure, unless a graph that was measured is alive, or the device has not passed it."""
        is_alive = any(index not in self.done for index in self.begun)
        self.is_measuring = not is_alive and (not self.called or self.done.keys() != self.called)
        if self.is_measuring:
            self.backward, self.called, self.done = Backward(), set(), {}
            self.begun.clear()

    def finish(self, sample: Sample) -> None:
        """Note that a layer has been recomputed."""
        if self.begun.get(sample.index) is sample:
            self.done[sample.index] = sample

    @property
    def is_measured(self) -> bool:
        """Whether all that was called has been, and the device has passed it."""
        return bool(self.called) and self.done.keys() == self.called and all(s.is_known for s in self.done.values())


class Controller:
    """Says what each layer call is to do.

    Args:
        engine: of the handle.
    """

    def __init__(self, engine: Engine) -> None:
        self.plan: Plan | None = None  # of the latest pass that followed one
        self._engine = engine
        self._buckets: dict[tuple[torch.device, int], Bucket] = {}
        self._is_warm = False
        self._is_declined = False

    def orders(self, layer: Layer, module: nn.Module, tensors: Sequence[Tensor]) -> Orders | None:
        """What a layer is to do with these inputs; None: send them off and be recomputed."""
        sizes = [(size_bytes(tensor), tensor.device) for tensor in tensors if tensor.is_floating_point()]
        if self._is_declined or not sizes:
            return None
        longest, device = max(sizes, key=lambda pair: pair[0])
        key = (device, round(math.log(max(longest, 1)) / math.log(BUCKET)))
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
        inputs = {id(t): size_bytes(t) for t in tensors if t.requires_grad and not is_parameter(t)}
        sample = Sample(layer.index, device, sum(inputs.values()), bucket.backward, bucket.finish)
        bucket.begun[layer.index] = sample
        return Orders(sample=sample)

    def _begin_pass(self, bucket: Bucket, device: torch.device) -> None:
        bucket.passes += 1
        self._is_warm = self._is_warm or bucket.passes > 1
        if bucket.plan is None and bucket.is_measured:
            self._make_plan(bucket, device)
        if bucket.plan is not None:
            self.plan = bucket.plan
        elif self._is_warm:
            bucket.begin_measuring()

    def _make_plan(self, bucket: Bucket, device: torch.device) -> None:
        samples = [bucket.done[index] for index in sorted(bucket.done)]
        priced = costs_of(samples)
        costs = [cost for cost, _ in priced]
        room = bucket.backward.outside_bytes
        if room > costs[-1].working_bytes - costs[-1].saved_bytes:  # else the last layer can be kept beside it
            costs.append(LayerCost(0.0, 0.0, 0.0, 0, 0, room, room))
        machine = self._machine(costs, bucket.backward.peak_bytes, device)
        plan = make_plan(costs, machine)
        for sample, (cost, places), layer in zip(samples, priced, plan.layers, strict=False):
            bucket.orders[sample.index] = Orders(
                keep=layer.keep,
                boundary_leaves=layer.boundary_leaves,
                on_device=frozenset(places[i] for i in layer.on_device),
                off_device=frozenset(places[i] for i in layer.off_device),
                names=tuple(call.name for call in sample.calls),
                fetch_early=plan.fetch_early,
                saved_bytes=cost.saved_bytes,
            )
        bucket.plan = plan
        bucket.begun.clear()
        bucket.done.clear()
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "activation offloading: plan for layers with inputs of %d bytes%s\n%s",
                max(cost.boundary_bytes for cost in costs),
                "; the last one stands for what follows the layers" if len(costs) > len(samples) else "",
                explain(costs, plan, machine),
            )

    def _machine(self, costs: Sequence[LayerCost], peak_bytes: int, device: torch.device) -> Machine:
        counters, options = self._engine.counters, self._engine.options
        self._engine.timeline.harvest()
        rate = LINK_BYTES_PER_S
        if counters.copied_bytes >= _TIMED_BYTES and counters.copy_ms:
            rate = counters.copied_bytes / counters.copy_ms * 1e3
        budget = options.max_device_bytes
        if budget is None:
            budget = self._free_bytes(costs, peak_bytes, device)
        return Machine(rate, rate, budget, options.max_host_bytes)

    def _free_bytes(self, costs: Sequence[LayerCost], peak_bytes: int, device: torch.device) -> int:
        """What a step may hold: what the one measured held, and what was free at its peak but for a margin."""
        if device.type == "cpu":
            return 0
        free, total = torch.get_device_module(device.type).mem_get_info(device)
        reach = free + torch.accelerator.memory_reserved(device)
        held = predict(costs, [LayerPlan()] * len(costs), False, Machine(1.0, 1.0, 0)).peak_bytes
        return max(0, int(held + reach - peak_bytes - MARGIN * total))

    def _decline(self, layer: Layer) -> None:
        self._is_declined = True
        logger.info(
            "activation offloading: layer %s communicates inside its forward, so that ranks must recompute alike; "
            "save='auto' sends off inputs only, as 'boundary' does",
            layer.name,
        )


def costs_of(samples: Sequence[Sample]) -> list[tuple[LayerCost, tuple[int, ...]]]:
    """The cost of each layer, equal for those that call the same, and the places of its operations among its calls."""
    groups: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        names = tuple(dict.fromkeys(call.name for call in sample.calls))
        groups.setdefault((sample.boundary_bytes, names), []).append(sample)
    costs = {id(sample): cost for members in groups.values() for cost in [_mean(members)] for sample in members}
    return [costs[id(sample)] for sample in samples]


def _mean(members: Sequence[Sample]) -> tuple[LayerCost, tuple[int, ...]]:
    operations: dict[int, Operation] = {}
    for place, calls in enumerate(zip(*(sample.calls for sample in members), strict=False)):
        if len({call.name for call in calls}) > 1:
            break
        if all(call.can_be_answered for call in calls):
            operations[place] = Operation(
                name=calls[0].name,
                at=fmean(sample.ends_at(call) for sample, call in zip(members, calls, strict=True)),
                seconds=fmean(call.seconds for call in calls),
                nbytes=round(fmean(call.nbytes for call in calls)),
            )
    dearest = sorted(operations, key=lambda place: -operations[place].seconds)[:_MAX_OPERATIONS]
    places = tuple(sorted(dearest))
    forward_s = fmean(sample.forward_s for sample in members)
    backwards = [sample.backward_s for sample in members if sample.backward_s is not None]
    boundary = members[0].boundary_bytes
    saved = round(fmean(sample.saved_bytes for sample in members))
    working = [s.working_bytes for s in members if s.working_bytes and s.late_bytes is not None]
    late = [s.late_bytes for s in members if s.working_bytes and s.late_bytes]
    # Without an allocator's figures: what is saved, and a gradient or two.
    return LayerCost(
        forward_s=forward_s,
        backward_s=fmean(backwards) if backwards else 2 * forward_s,
        recompute_s=fmean(sample.recompute_s for sample in members),
        boundary_bytes=boundary,
        saved_bytes=saved,
        working_bytes=max(working) if late else saved + 2 * boundary,
        late_bytes=max(late) if late else saved // 2 + 2 * boundary,
        operations=tuple(operations[place] for place in places),
    ), places


def has_collectives(module: nn.Module) -> bool:
    """Whether a layer communicates inside its forward: tensor-parallel weights, or units of FSDP inside."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    inner = [child for child in module.modules() if child is not module]
    has_units = any(isinstance(child, (FSDPModule, FullyShardedDataParallel)) for child in inner)
    return has_units or any(isinstance(parameter, DTensor) for parameter in module.parameters())
