"""The controller of `save="auto"`: it profiles the first passes of each length, and gives later passes a plan.

Lengths are grouped into buckets, each 1.25 times as long as the one before; a bucket has one profile and one plan. In a profiled
pass, layers offload their inputs and recompute the rest. The next passes do the same until the device has finished the profiled
one, for which the controller does not wait. The very first pass warms up: it chooses kernels and allocates memory, so its times
are not used. It is profiled only to compare its bytes with cached profiles (Note [cached profiles] in `consensus.py`).

Note [states that come later]
The optimizer's first step makes its states, which last. With gradient accumulation, passes are profiled and planned before it.
Such a plan takes memory that is free then, and nobody else needs it until the step. So each planned pass looks at what is free
when it begins. If that is much less than the plan's budget, the pass is planned anew from the same profile, before its first layer
runs. Ranks that agree do not look: they say beforehand what comes (`reserve_bytes`).

Note [ranks that agree]
Ranks may have different lengths in the same pass, and one rank may profile a length that another rank never meets. So ranks
exchange nothing during a pass. They exchange profiles in `PlanController.agree`, which all ranks call between passes. For each
length they take the longest times and the most bytes of any rank, and the smallest budget. Equal figures give equal plans, so a
rank may make the plan of a length later, when it first meets that length. A rank that never calls `agree` plans by itself.
In both cases two ranks may recompute differently in the same pass, because their lengths or their plans differ. Recomputation
repeats any communication in a layer's forward, so a model with such layers gets no plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlx.offload.autotune.consensus import Consensus, RankReport, longest_input_bytes
from rlx.offload.autotune.layer_profile import LayerProfile
from rlx.offload.autotune.length_bucket import Key, LengthBucket
from rlx.offload.autotune.op_profile import DeviceMemoryProbe, Inputs
from rlx.offload.autotune.pass_profile import PassProfile, planned
from rlx.offload.autotune.profile_cache import ProfileCache
from rlx.offload.autotune.profile_key import describe_call
from rlx.offload.autotune.step_limits import StepLimits, gradient_counter
from rlx.offload.plan.costs import Budget
from rlx.offload.plan.explain import explain
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.replay.dead_ops import DeadOpCheck
from rlx.offload.replay.instructions import LayerInstructions
from rlx.offload.runtime.layers import fsdp_kinds
from rlx.offload.runtime.session import Layer, OffloadSession
from rlx.offload.storage.regions import size_bytes

logger = logging.getLogger("rlx.offload")

BUCKET_RATIO = 1.25  # the longest over the shortest length that share a plan


class PlanController:
    """Gives each layer call its policy. `cache` holds profiles of earlier runs; None: nothing is read or written."""

    def __init__(
        self,
        session: OffloadSession,
        parameters: Callable[[], Iterable[nn.Parameter]],
        cache: ProfileCache | None = None,
    ) -> None:
        self.plan: Plan | None = None  # of the latest planned pass
        self.limits = StepLimits(session, parameters)
        self._session = session
        self._cache = cache
        self._known_layers: set[int] = set()  # layers that have been called
        self._last: LengthBucket | None = None
        self._devices: list[torch.device] = []
        self._buckets: dict[Key, LengthBucket] = {}
        self._is_warm = self._is_declined = False
        self._agrees = False  # `agree` has been called: plans are made there only
        self._is_first_rank = True
        self._consensus = Consensus()
        self._cache_key: dict[str, Any] | None = None  # None: no pass has been profiled yet
        self._measured: dict[Key, PassProfile] = {}  # profiled since the last report
        self._unwritten: dict[Key, PassProfile] = {}  # profiles of all ranks that wait for the cache key
        self._warm_up: dict[Key, PassProfile] = {}  # likewise, in the pass that warmed up

    def decide(
        self, layer: Layer, module: nn.Module, tensors: Sequence[Tensor]
    ) -> LayerInstructions | LayerProfile | None:
        """Return the plan's instructions for a layer call, or a profile that measures it; None: boundary mode."""
        sizes = [(size_bytes(tensor), tensor.device) for tensor in tensors if tensor.is_floating_point()]
        if self._is_declined or not sizes:
            return None
        longest, device = max(sizes, key=lambda pair: pair[0])
        if device not in self._devices:
            self._devices.append(device)
        if layer.index not in self._known_layers:
            self._known_layers.add(layer.index)
            if has_collectives(module):
                self._decline(layer)
                return None
            if self._cache is not None:
                self._cache.see(layer, module)
        length = round(math.log(max(longest, 1)) / math.log(BUCKET_RATIO))
        bucket = self._bucket((self._devices.index(device), length))
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
        bucket.state.begin(profile)
        return profile

    def agree(self, group: dist.ProcessGroup | None, reserve_bytes: int) -> None:
        """Plan all lengths that any rank of a group has profiled, with equal plans on all ranks.

        Args:
            group: the ranks; None: the default group, or this process alone if there is none.
            reserve_bytes: memory that this rank's next step will allocate and keep, apart from gradients.
        """
        for bucket in self._buckets.values():
            self._collect(bucket)
        if not self._agrees:  # until now this rank has planned by itself
            self._agrees, self._consensus, self._cache_key = True, Consensus(), None
            for key, bucket in self._buckets.items():
                bucket.replan()
                if bucket.is_cached:
                    bucket.forget()
                elif bucket.profile is not None:
                    self._measured[key] = bucket.profile
        self.limits.reserve(reserve_bytes)
        own = self._report()
        reports = [own]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            self._is_first_rank = dist.get_rank(group) == 0
            reports = reports * dist.get_world_size(group)
            dist.all_gather_object(reports, own, group)
        self._join(reports)
        budget = self.limits.budget([report.limits for report in reports])
        for bucket in self._buckets.values():
            if bucket.profile is not None and bucket.budget is None:
                bucket.budget = budget
                if bucket.passes:
                    self._make_plan(bucket, bucket.profile, budget)

    def measurement(self) -> PassProfile | None:
        """Return the profile of the latest pass's length; None if there is none yet."""
        return None if self._last is None else self._last.profile

    def limit(self, device_bytes: int) -> None:
        """Discard all plans; new ones hold at most `device_bytes` on the device."""
        self.limits.most_bytes = device_bytes
        self.plan = None
        for bucket in self._buckets.values():
            bucket.replan()

    def _bucket(self, key: Key) -> LengthBucket:
        return self._buckets.get(key) or self._buckets.setdefault(key, LengthBucket(key))

    def _begin_pass(self, bucket: LengthBucket, tensors: Sequence[Tensor]) -> None:
        bucket.passes += 1
        self._last = bucket
        self._is_warm = self._is_warm or bucket.passes > 1
        self._collect(bucket)
        if bucket.plan is not None and not self._agrees and self.limits.uses_room:
            self._note_room(bucket, Inputs.of(tensors))
            if self.limits.has_shrunk(bucket.device_bytes):  # Note [states that come later]
                bucket.replan()
        if bucket.plan is None:
            self._plan_or_measure(bucket, tensors)
        self.plan = bucket.plan or self.plan

    def _plan_or_measure(self, bucket: LengthBucket, tensors: Sequence[Tensor]) -> None:
        call = describe_call(tensors, self._devices[bucket.key[0]])
        if self._agrees:
            bucket.call = call  # the first rank may follow a plan from its first pass on, and has to know the cache key
        else:
            self._join([self._report()])
            self._check_cached(bucket, tensors, call)
        if bucket.profile is not None:
            budget = bucket.budget if self._agrees else self.limits.budget([self.limits.own()])
            if budget is not None:
                self._make_plan(bucket, bucket.profile, budget)
            return
        # The first pass is profiled to compare it with the cache, if there is one or the first rank may have one.
        compares_cache = self._cache is not None and (self._agrees or self._cache.has_folder)
        if self._is_warm or compares_cache:
            if bucket.state.is_warm_up and self._is_warm and bucket.key not in self._consensus.cached:
                bucket.drop()  # no cached profile to compare it with, so do not wait until the device has passed it
            bucket.begin_measuring(self.limits.new_pass(is_warm_up=not self._is_warm), call)

    def _check_cached(self, bucket: LengthBucket, tensors: Sequence[Tensor], call: Mapping[str, Any]) -> None:
        """Drop a cached profile that does not apply to the pass that begins; else note the device memory for that pass."""
        if bucket.profile is None or not bucket.is_cached or self._cache is None:
            return
        inputs = Inputs.of(tensors)
        is_longer = inputs.boundary_bytes > longest_input_bytes(bucket.profile)
        if is_longer or self._cache.key(call, self._devices) != self._cache_key:
            bucket.forget()
        else:
            self._note_room(bucket, inputs)

    def _note_room(self, bucket: LengthBucket, inputs: Inputs) -> None:
        """Note the device memory that is free for a pass that begins with these inputs."""
        device = self._devices[bucket.key[0]]
        own_bytes = sum(inputs.memory.values()) + sum(inputs.shared.values()) + self.limits.gathered_bytes()
        baseline_bytes = max(0, DeviceMemoryProbe(device).look()[0] - own_bytes)
        self.limits.note_room(device, baseline_bytes, self.limits.pending_bytes())

    def _report(self) -> RankReport:
        """Return what is new since the last report. The first rank reads the cache once its layers are known."""
        cached: dict[Key, PassProfile] = {}
        called = [bucket.call for bucket in self._buckets.values() if bucket.call]
        if self._cache is not None and self._cache_key is None and called:
            self._cache_key = self._cache.key(called[0], self._devices)
            cached = self._cache.read(self._cache_key) if self._is_first_rank else {}
        report = RankReport(self._measured, self._warm_up, cached, self.limits.own())
        self._measured, self._warm_up = {}, {}
        return report

    def _join(self, reports: Sequence[RankReport]) -> None:
        """Give each length the profile on which ranks agree, and write new profiles to the cache."""
        measured = self._consensus.join(reports)
        for bucket in self._buckets.values():
            if bucket.is_cached and self._consensus.is_refuted:
                bucket.replan()
                bucket.forget()
        for key, profile in {**self._consensus.accepted(), **measured}.items():
            bucket = self._bucket(key)
            if key in measured or bucket.profile is None:
                bucket.profile, bucket.is_cached = profile, key not in measured
        if self._cache is None or not self._is_first_rank:
            return
        self._unwritten |= measured
        if self._cache_key is None:
            return
        call, new = self._cache_key["call"], dict[Key, PassProfile]()
        for key, profile in self._unwritten.items():
            # For a length that only other ranks have met, assume the call that the cache key describes.
            if (self._buckets[key].call or call) == call and self._consensus.is_new(key, profile):
                new[key] = profile
        self._unwritten = {}
        if new:
            self._cache.write(self._cache_key, new, keep_others=not self._consensus.is_refuted)

    def _collect(self, bucket: LengthBucket) -> None:
        """Take the profile of a measured pass, if it is complete, and note the device memory that was free for it."""
        profile = bucket.take()
        if profile is None:
            return
        self.limits.note_room(self._devices[bucket.key[0]], bucket.state.baseline_bytes, bucket.state.pending_bytes)
        if bucket.state.is_warm_up:
            self._warm_up[bucket.key] = profile
        else:
            bucket.profile = self._measured[bucket.key] = profile

    def _make_plan(self, bucket: LengthBucket, profile: PassProfile, budget: Budget) -> None:
        kinds = [planned(kind) for kind in profile.kinds]
        of_layer = {index: kind for kind in kinds for index in kind.members}
        indices = sorted(of_layer)
        costs = [of_layer[index].cost for index in indices]
        budget = replace(budget, loss_s=profile.loss_s, loss_bytes=profile.loss_bytes)
        plan = make_plan(costs, budget)
        bucket.instructions.clear()
        checks: dict[tuple[int, frozenset[int]], DeadOpCheck] = {}
        for index, layer, fetch in zip(indices, plan.layers, plan.fetches, strict=True):
            bucket.instructions[index] = of_layer[index].instructions(layer, fetch, checks)
        bucket.plan, bucket.device_bytes = plan, budget.device_bytes
        if self._is_first_rank and logger.isEnabledFor(logging.INFO):
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
    """Return whether a layer communicates in its forward: it has tensor-parallel weights, or FSDP units inside."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    has_units = any(isinstance(child, fsdp_kinds()) for child in module.modules() if child is not module)
    return has_units or any(isinstance(parameter, DTensor) for parameter in module.parameters())
