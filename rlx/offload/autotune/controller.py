"""The controller of `save="auto"`: it profiles the first passes of each length, and gives later passes a plan.

Lengths are grouped into buckets, each 1.25 times as long as the one before; a bucket has one profile and one plan. In a profiled
pass, layers offload their inputs and recompute the rest. The next passes do the same until the device has finished the profiled
one, for which the controller does not wait. The very first pass warms up: it chooses kernels and allocates memory, so its times
are not used. It is profiled only to compare its bytes with cached profiles (Note [cached profiles] in `consensus.py`).

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
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlx.offload.autotune.consensus import Consensus, Limits, RankReport, longest_input_bytes
from rlx.offload.autotune.layer_profile import BackwardWindow, DeviceMemoryProbe, LayerProfile
from rlx.offload.autotune.length_bucket import Key, LengthBucket
from rlx.offload.autotune.pass_profile import PassProfile, planned
from rlx.offload.autotune.profile_cache import ProfileCache
from rlx.offload.autotune.profile_key import describe_call
from rlx.offload.plan.costs import Budget
from rlx.offload.plan.explain import explain
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.replay.dead_ops import DeadOpProof
from rlx.offload.replay.instructions import LayerInstructions
from rlx.offload.runtime.session import Layer, OffloadSession
from rlx.offload.storage.regions import is_parameter, is_plain, size_bytes, storage_address
from rlx.offload.storage.stats import measured_rate

logger = logging.getLogger("rlx.offload")

BUCKET_RATIO = 1.25  # the longest over the shortest length that share a plan
MARGIN = 0.05  # share of device memory that a plan leaves free
LINK_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 1e9  # until copies have been timed


class Inputs(NamedTuple):
    """Sizes of the tensors that a layer is called with [bytes].

    Args:
        own: size of each tensor that requires a gradient, by id; without parameters.
        memory: the same sizes, by address of the storage.
        shared: size of each tensor that requires no gradient, by address of the storage.
    """

    own: dict[int, int]
    memory: dict[int, int]
    shared: dict[int, int]

    @property
    def boundary_bytes(self) -> int:
        """Size of the tensors that require a gradient."""
        return sum(self.own.values())


class PlanController:
    """Gives each layer call its policy.

    Args:
        session: of the handle.
        parameters: returns the model's parameters.
        cache: profiles of earlier runs; None: nothing is read or written.
    """

    def __init__(
        self,
        session: OffloadSession,
        parameters: Callable[[], Iterable[nn.Parameter]],
        cache: ProfileCache | None = None,
    ) -> None:
        self.plan: Plan | None = None  # of the latest planned pass
        self._session = session
        self._parameters = parameters
        self._cache = cache
        self._known_layers: set[int] = set()  # layers that have been called
        self._last: LengthBucket | None = None
        self._devices: list[torch.device] = []
        self._buckets: dict[Key, LengthBucket] = {}
        self._is_warm = self._is_declined = self._has_noted_no_device = False
        self._agrees = False  # `agree` has been called: plans are made there only
        self._is_first_rank = True
        self._consensus = Consensus()
        self._cache_key: dict[str, Any] | None = None  # None: no pass has been profiled yet
        self._measured: dict[Key, PassProfile] = {}  # profiled since the last report
        self._unwritten: dict[Key, PassProfile] = {}  # profiles of all ranks that wait for the cache key
        self._warm_up: dict[Key, PassProfile] = {}  # likewise, in the pass that warmed up
        self._reserve_bytes = 0
        self._gradient_bytes: int | None = None  # of all gradients, as a rank holds them between steps
        self._room_bytes: int | None = None  # device memory for a step, the least found so far; None: not measured yet
        self._limit_bytes: int | None = None  # set when the device has run out of memory

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
        key = (self._devices.index(device), round(math.log(max(longest, 1)) / math.log(BUCKET_RATIO)))
        bucket = self._buckets.get(key) or self._buckets.setdefault(key, LengthBucket())
        if layer.index <= bucket.last_index or not bucket.passes:
            self._begin_pass(bucket, key, tensors)
        bucket.last_index = layer.index
        if bucket.plan is not None:
            return bucket.instructions.get(layer.index)
        if not bucket.is_measuring or layer.index in bucket.called:
            return None
        bucket.called.add(layer.index)
        inputs = _inputs_of(tensors)
        profile = LayerProfile(
            layer.index,
            device,
            inputs.boundary_bytes,
            bucket.backward,
            bucket.finish,
            inputs.shared,
            self._session.options.min_bytes,
            inputs=inputs.memory,
            # Gradients of parameters that FSDP2 has gathered are freed within the pass, so none of them is counted here.
            gradient_bytes=partial(
                _made_gradient_bytes, () if bucket.backward.is_sharded else tuple(module.parameters())
            ),
            sees_calls=bucket.sees_calls(layer.index),
        )
        bucket.begun[layer.index] = profile
        return profile

    def agree(self, group: dist.ProcessGroup | None, reserve_bytes: int) -> None:
        """Plan all lengths that any rank of a group has profiled, with equal plans on all ranks.

        Args:
            group: the ranks; None: the default group, or this process alone if there is none.
            reserve_bytes: memory that this rank's next step will allocate and keep, apart from gradients.
        """
        for key, bucket in self._buckets.items():
            if key[0] < len(self._devices):  # else only other ranks have met the length
                self._collect(bucket, key)
        if not self._agrees:  # until now this rank has planned by itself
            self._agrees, self._consensus, self._cache_key = True, Consensus(), None
            for key, bucket in self._buckets.items():
                bucket.replan()
                if bucket.is_cached:
                    bucket.profile, bucket.is_cached = None, False
                elif bucket.profile is not None:
                    self._measured[key] = bucket.profile
        self._reserve_bytes, self._gradient_bytes = reserve_bytes, self._count_gradients()
        own = self._report()
        reports = [own]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            self._is_first_rank = dist.get_rank(group) == 0
            reports = reports * dist.get_world_size(group)
            dist.all_gather_object(reports, own, group)
        self._join(reports)
        budget = self._budget([report.limits for report in reports])
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
        self._limit_bytes = device_bytes
        self.plan = None
        for bucket in self._buckets.values():
            bucket.replan()

    def _begin_pass(self, bucket: LengthBucket, key: Key, tensors: Sequence[Tensor]) -> None:
        bucket.passes += 1
        self._last = bucket
        self._is_warm = self._is_warm or bucket.passes > 1
        self._collect(bucket, key)
        call = describe_call(tensors, self._devices[key[0]]) if bucket.plan is None else {}
        if self._agrees and call:
            bucket.call = call  # the first rank may follow a plan from its first pass on, and has to know the cache key
        if bucket.plan is None and not self._agrees:
            self._join([self._report()])
            self._check_cached(bucket, key, tensors, call)
        budget = bucket.budget if self._agrees else None
        if bucket.plan is None and bucket.profile is not None and (budget is not None or not self._agrees):
            self._make_plan(bucket, bucket.profile, budget or self._budget([self._limits()]))
        if bucket.plan is not None:
            self.plan = bucket.plan
        elif bucket.profile is None and (self._is_warm or self._compares_cache):
            if bucket.is_first and self._is_warm and key not in self._consensus.cached:
                bucket.drop()  # no cached profile to compare it with, so do not wait until the device has passed it
            is_sharded = any(map(_is_sharded, self._parameters()))
            window = BackwardWindow(self._count_made_gradients, is_sharded, self._gathered_bytes())
            bucket.begin_measuring(window, self._coming_bytes(), call, is_first=not self._is_warm)

    @property
    def _compares_cache(self) -> bool:
        """Whether the first pass is profiled: there is a cache, or the first rank may have one."""
        return self._cache is not None and (self._agrees or self._cache.has_folder)

    def _check_cached(self, bucket: LengthBucket, key: Key, tensors: Sequence[Tensor], call: Mapping[str, Any]) -> None:
        """Drop a cached profile that does not apply to the pass that begins; else note the device memory for that pass."""
        if bucket.profile is None or not bucket.is_cached or self._cache is None:
            return
        inputs, device = _inputs_of(tensors), self._devices[key[0]]
        is_longer = inputs.boundary_bytes > longest_input_bytes(bucket.profile)
        if is_longer or self._cache.key(call, self._devices) != self._cache_key:
            bucket.profile, bucket.is_cached = None, False
        else:
            step_bytes = sum(inputs.memory.values()) + sum(inputs.shared.values()) + self._gathered_bytes()
            begin_bytes = max(0, DeviceMemoryProbe(device).look()[0] - step_bytes)
            self._note_room(device, begin_bytes, self._coming_bytes())

    def _report(self) -> RankReport:
        """Return what is new since the last report. The first rank reads the cache once its layers are known."""
        cached: dict[Key, PassProfile] = {}
        called = [bucket.call for bucket in self._buckets.values() if bucket.call]
        if self._cache is not None and self._cache_key is None and called:
            self._cache_key = self._cache.key(called[0], self._devices)
            cached = self._cache.read(self._cache_key) if self._is_first_rank else {}
        report = RankReport(self._measured, self._warm_up, cached, self._limits())
        self._measured, self._warm_up = {}, {}
        return report

    def _join(self, reports: Sequence[RankReport]) -> None:
        """Give each length the profile on which ranks agree, and write new profiles to the cache."""
        measured = self._consensus.join(reports)
        for bucket in self._buckets.values():
            if bucket.is_cached and self._consensus.is_refuted:
                bucket.replan()
                bucket.profile, bucket.is_cached = None, False
        for key, profile in {**self._consensus.accepted(), **measured}.items():
            bucket = self._buckets.setdefault(key, LengthBucket())
            if key in measured or bucket.profile is None:
                bucket.profile, bucket.is_cached = profile, key not in measured
        if self._cache is None or not self._is_first_rank:
            return
        self._unwritten |= measured
        if self._cache_key is None:
            return
        # For a length that only other ranks have met, assume the call that the cache key describes.
        calls = {key: self._buckets[key].call or self._cache_key["call"] for key in self._unwritten}
        alike = {key: profile for key, profile in self._unwritten.items() if calls[key] == self._cache_key["call"]}
        new = {key: profile for key, profile in alike.items() if self._consensus.is_new(key, profile)}
        self._unwritten = {}
        if new:
            self._cache.write(self._cache_key, new, keep_others=not self._consensus.is_refuted)

    def _coming_bytes(self) -> int:
        """Return the memory of gradients and other states that do not exist yet, and that a step will make and keep."""
        if any(parameter.grad is not None for parameter in self._parameters()):
            return self._reserve_bytes
        gradients = self._count_gradients() if self._gradient_bytes is None else self._gradient_bytes
        return self._reserve_bytes + gradients

    def _count_gradients(self) -> int:
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        return sum(_own_bytes(parameter) for parameter in trained if parameter.device.type != "cpu")

    def _gathered_bytes(self) -> int:
        """Return the memory of parameters that FSDP2 has gathered; 0 without FSDP2."""
        parameters = list(self._parameters())
        gathered = [parameter for parameter in parameters if not _is_sharded(parameter)]
        if len(gathered) == len(parameters):
            return 0
        return sum(size_bytes(parameter) for parameter in gathered if parameter.device.type != "cpu")

    def _count_made_gradients(self) -> int:
        parameters = list(self._parameters())
        sharded = [parameter for parameter in parameters if _is_sharded(parameter)]
        return _made_gradient_bytes(sharded or parameters)

    def _collect(self, bucket: LengthBucket, key: Key) -> None:
        """Take the profile of a measured pass, if it is complete, and note the device memory that was free for it."""
        profile = bucket.take()
        if profile is None:
            return
        self._note_room(self._devices[key[0]], bucket.backward.begin_bytes, bucket.coming_bytes)
        if bucket.is_first:
            self._warm_up[key] = profile
        else:
            bucket.profile = self._measured[key] = profile

    def _note_room(self, device: torch.device, begin_bytes: int, coming_bytes: int) -> None:
        """Note how much memory a device has for the step.

        Args:
            device: on which the layers compute.
            begin_bytes: memory allocated when the layers begin.
            coming_bytes: see `_coming_bytes`.
        """
        if device.type != "cpu":
            free, total = torch.get_device_module(device.type).mem_get_info(device)
            usable = free + torch.accelerator.memory_reserved(device)
            room = int(usable - MARGIN * total) - begin_bytes - coming_bytes
            self._room_bytes = max(0, room if self._room_bytes is None else min(room, self._room_bytes))

    def _limits(self) -> Limits:
        stats, options = self._session.stats(per_layer=False), self._session.options
        budget = self._room_bytes if isinstance(options.max_device_bytes, str) else options.max_device_bytes
        return Limits(
            link_bytes_per_s=measured_rate(stats.copied_bytes, stats.copy_ms),
            device_bytes=budget,
            host_bytes=options.host_bytes,
            disk_bytes_per_s=measured_rate(stats.disk_bytes, stats.disk_ms),
        )

    def _budget(self, ranks: Sequence[Limits]) -> Budget:
        """Return the smallest budget of any rank."""
        known = ([value for value in values if value is not None] for values in zip(*ranks, strict=True))
        links, budgets, hosts, disks = known
        if not budgets and not self._has_noted_no_device:
            self._has_noted_no_device = True
            logger.info(
                "activation offloading: there is no accelerator, so max_device_bytes='auto' keeps as little as "
                "possible; set a number of bytes to keep more"
            )
        budget = min(budgets, default=0)
        budget = budget if self._limit_bytes is None else min(budget, self._limit_bytes)
        link = min(links, default=LINK_BYTES_PER_S)
        disk = min(disks, default=DISK_BYTES_PER_S) if self._session.options.uses_disk else 0.0
        return Budget(link, link, budget, min(hosts, default=None), disk)

    def _make_plan(self, bucket: LengthBucket, profile: PassProfile, budget: Budget) -> None:
        kinds = [planned(kind) for kind in profile.kinds]
        of_layer = {index: kind for kind in kinds for index in kind.members}
        indices = sorted(of_layer)
        costs = [of_layer[index].cost for index in indices]
        budget = replace(budget, turnaround_s=profile.turnaround_s, turnaround_bytes=profile.outside_bytes)
        plan = make_plan(costs, budget)
        bucket.instructions.clear()
        proofs: dict[tuple[int, frozenset[int]], DeadOpProof] = {}
        for index, layer, fetch in zip(indices, plan.layers, plan.fetches, strict=True):
            bucket.instructions[index] = of_layer[index].instructions(layer, fetch, proofs)
        bucket.plan = plan
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


def _inputs_of(tensors: Sequence[Tensor]) -> Inputs:
    own = [t for t in tensors if t.requires_grad and not is_parameter(t)]
    return Inputs(
        {id(t): size_bytes(t) for t in own},
        {storage_address(t): size_bytes(t) for t in own if is_plain(t)},
        {storage_address(t): size_bytes(t) for t in tensors if not t.requires_grad and is_plain(t)},
    )


def _made_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(_own_bytes(gradient) for gradient in gradients if gradient.device.type != "cpu")


def _is_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor, which FSDP2 has not gathered at the moment."""
    return hasattr(parameter, "to_local")


def _own_bytes(parameter: Tensor) -> int:
    """Return the size of a parameter, of this rank's shard if it is sharded."""
    to_local = getattr(parameter, "to_local", None)
    return size_bytes(parameter if to_local is None else to_local())


def has_collectives(module: nn.Module) -> bool:
    """Return whether a layer communicates in its forward: it has tensor-parallel weights, or FSDP units inside."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    inner = [child for child in module.modules() if child is not module]
    has_units = any(isinstance(child, (FSDPModule, FullyShardedDataParallel)) for child in inner)
    return has_units or any(isinstance(parameter, DTensor) for parameter in module.parameters())
