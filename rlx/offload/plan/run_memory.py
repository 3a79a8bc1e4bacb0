"""The memory and time of a training step, and the memory of each phase of a run, from sizes alone: for `rlx plan` and `rlx check`.

A device holds in each phase:

- of each idle model: weights and optimizer state, unless they are on the host;
- of the working model: weights (two layers of a model that streams), the weights that FSDP gathers, the activations of one
  micro-batch; in an update also gradients and the optimizer state that is not on the host;
- of the sampler: vLLM's share while it is awake, or a copy of the weights and the cache of transformers' sampler.

A vLLM that takes adapters alone keeps its base in host memory while it sleeps. Without an accelerator all memory is the host's. The
memory of an update is the largest of forward, head, backward and optimizer step. `sync` holds the sampler's weights, the policy, and
its largest tensor in one piece; adapters alone are gathered first, and the policy rests when the sampler wakes.

Not counted: CUDA, NCCL and the allocator (6 % of a device are reserved for them); Python and torch on the host; the head's
gradient, which FSDP keeps whole until backward ends; prefill of transformers' sampler; staging memory of a disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.hardware import DEVICE_SHARE, Hardware
from rlx.offload.plan.memory import ADAPTER_BYTES, NF4_BYTES, StateBytes, forward_bytes, head_forward_bytes, step_bytes
from rlx.offload.plan.model_costs import E, head_cost, layer_cost
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import predict

STEP_TOKENS = 1024  # the longest context is found to a multiple of this
_ATTENTION = {"q", "k", "v", "attention", "o"}
PLANNED_MODES = ("plain", "checkpointing", "boundary", "attention", "auto")
CPU_CACHE_BYTES = 1 << 30  # vLLM's on a CPU
CUDA_BYTES = 2e9  # on a device, outside vLLM's share, which has a reserve of its own
DISK_BYTES_PER_S = 2e9  # any value: the split between tiers does not depend on it
NO_LIMIT = 1 << 60
# At most: torch rounds each page-locked block up to a power of two; Qwen2.5-14B's 29.5 GB took 54.1.
PINNED_ROUNDING = 2


class Phase(NamedTuple):
    """The most memory that one process needs in a phase [bytes]."""

    name: str
    parts: dict[str, float]  # of the peak: others, weights, gradients, optimizer, gathered, working, sampler
    limit: float | None  # of the parts' sum; None: not known
    host: float  # states and activations of all models in host memory
    host_limit: float | None
    where: str = ""  # the part of the phase that reaches the peak; empty if the phase has one part only
    disk: float = 0.0  # activations on disk
    lacking: float = 0.0  # bytes that the sampler's share lacks for one sequence

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    def fits(self, margin: float = 1.0) -> bool:
        """Whether the phase fits into `margin` times the memory of device, host and sampler."""
        return self.fits_device(margin) and self.fits_host(margin)

    def fits_device(self, margin: float = 1.0) -> bool:
        """Whether the peak fits into `margin` times its limit, and a sequence into that of the sampler's share."""
        has_room = self.limit is None or self.peak <= self.limit * margin
        return has_room and self.lacking <= self.parts.get("sampler", 0.0) * (margin - 1)

    def fits_host(self, margin: float = 1.0) -> bool:
        return self.host_limit is None or self.host <= self.host_limit * margin


class Load(NamedTuple):
    """The largest micro-batch on one process."""

    tokens: int
    logits: int  # tokens whose log-probs are computed


@dataclass(frozen=True)
class ModelMemory:
    """One process's part of a model under FSDP."""

    decoder: Decoder
    shards: int = 1  # processes that share its weights
    stored: int = 4  # bytes of a stored weight
    element: int = E  # bytes of an element of activations
    summed_in: int = E  # bytes of a gradient's element while it is summed over processes
    is_trained: bool = True
    has_device: bool = True  # it runs on an accelerator, so states can be offloaded
    gradient_bytes: int | None = None  # of a weight; None: `stored`
    optimizer_bytes: float | None = None  # of a weight's optimizer states together; None: twice `stored`
    adapter_rank: int = 0  # of LoRA adapters, which are then the only trained weights and at least fp32; 0: none
    is_resharded: bool = True  # FSDP frees gathered layers after forward; else all of them remain on the device
    stays_whole: bool = False  # until the update ends, and so do gradients
    is_quantized: bool = (
        False  # the layers' weights have `NF4_BYTES`; the two largest of a layer are also there in full
    )
    weights_rest_on_host: bool = False
    steps_on_host: bool = False  # weights, gradients and the optimizer's step are on the host
    device_state_bytes: float = inf  # of the optimizer's state, the part that stays on the device
    streams: bool = False  # the weights of its layers wait on the host
    from_disk: bool = False  # or on its disk
    sharing: int = 1  # processes of a machine, which share them
    mode: str = "checkpointing"  # of its activations, as for `Scenario.plan`
    tile: int | None = None  # tokens per tile of MLPs and norms; None: no tiles; 0: as `enable_tiling` chooses
    shared_by: int = 1  # processes that share each sequence
    host_room: int = NO_LIMIT  # for offloaded activations
    has_disk: bool = False  # for those that the host has no room for

    @cached_property
    def update(self) -> StateBytes:
        return self._states(self.is_trained)

    @cached_property
    def forward(self) -> StateBytes:
        """The same in a pass without backward."""
        return self._states(False)._replace(optimizer=self.update.optimizer)

    def _states(self, is_trained: bool) -> StateBytes:
        decoder, element, layers = self.decoder, self.element, len(self._layers)
        adapters, largest = decoder.adapters(self.adapter_rank), self._layers[-1]
        of_trained = max(self.stored, ADAPTER_BYTES) if self.adapter_rank else self.stored
        trained = is_trained * (adapters if self.adapter_rank else decoder.parameters)
        of_adapters = adapters // layers
        with_gradient = is_trained * (of_adapters if self.adapter_rank else largest)
        at_once = 2 if self.is_resharded else layers
        of_layer = NF4_BYTES if self.is_quantized else self.stored
        is_gathered = self.shards > 1 or self.stored != element
        gathered: float = is_gathered * element * (decoder.root_parameters + at_once * of_adapters)
        if self.is_quantized:
            gathered += (self.shards > 1) * NF4_BYTES * at_once * largest
            gathered += 2 * element * decoder.width * max(decoder.mlp_width, decoder.heads * decoder.head_width)
        else:
            gathered += is_gathered * element * at_once * largest
        summed: float = (is_gathered or self.summed_in != element) * self.summed_in * with_gradient
        layer_weights = decoder.parameters - decoder.root_parameters
        weights = decoder.root_parameters * self.stored + layer_weights * of_layer + adapters * of_trained
        weights /= self.shards
        if (
            self.streams
        ):  # FSDP gathers none of the layers. Norms and biases, which stay on the device, are less than 0.1 %.
            gathers_layers = self.shards > 1 or of_layer != self._on_host
            gathered = max(0.0, gathered - largest * at_once * self._on_host * gathers_layers)
            weights = weights - sum(self._layers) * of_layer / self.shards + self.buffers
        if self.shards > 1 and self.stays_whole:
            # FSDP2 holds the weights a second time, in one piece, through the first forward, and later the sum's copy to reduce.
            summed = max(gathered, 2 * self.summed_in * trained)
        gathered += summed
        gradients = trained * (self.gradient_bytes or of_trained) / self.shards
        optimizer = trained * (self.optimizer_bytes or 2 * of_trained) / self.shards
        return StateBytes(weights, gradients, optimizer, gathered)

    @cached_property
    def _layers(self) -> list[int]:
        return sorted(map(self.decoder.layer_parameters, range(len(self.decoder.windows))))

    @property
    def _on_host(self) -> float:
        return NF4_BYTES if self.is_quantized else self.element

    @property
    def streamed(self) -> float:
        """Bytes of the layers' weights that wait on the host, or on its disk."""
        return float(sum(self._layers) * self._on_host) if self.streams else 0.0

    @property
    def buffers(self) -> float:
        """Bytes of two such layers, on the device while the model works; part of the states' weights."""
        return float(sum(self._layers[-2:]) * self._on_host) if self.streams else 0.0

    @property
    def moving_state(self) -> float:
        """Bytes of the optimizer's state that are on the host, and on the device only during the step."""
        if not self.has_device or self.steps_on_host:
            return 0.0
        return max(0.0, self.update.optimizer - self.device_state_bytes)

    @property
    def staying_state(self) -> float:
        """Bytes of the optimizer's state that are always on the device."""
        return 0.0 if self.steps_on_host else self.update.optimizer - self.moving_state

    @property
    def device_at_rest(self) -> float:
        """Bytes on the device while another model works."""
        if self.steps_on_host:
            return 0.0
        return self.staying_state + (0.0 if self.weights_rest_on_host else self.update.weights - self.buffers)

    @property
    def host_at_rest(self) -> float:
        """Bytes on the host while another model works."""
        return self._waiting + self.update.weights - self.buffers + self.update.optimizer - self.device_at_rest

    @property
    def host_at_work(self) -> float:
        """Bytes on the host while this model works, activations aside."""
        return self._waiting + (sum(self.update[:3]) - self.buffers if self.steps_on_host else self.moving_state)

    @property
    def _waiting(self) -> float:
        return 0.0 if self.from_disk else self.streamed / self.sharing

    def on_device(self, states: StateBytes) -> StateBytes:
        """Return the part of `states` on the device while this model works."""
        return states._replace(weights=self.buffers, gradients=0.0, optimizer=0.0) if self.steps_on_host else states


class Phases(NamedTuple):
    """Peak device memory of each phase of a training step, always with gradients [bytes]."""

    forward: float
    head: float
    backward: float
    step: float


class Scenario(NamedTuple):
    """A model's step on a machine."""

    own: ModelMemory
    hardware: Hardware
    sequences: int = 1  # in a micro-batch, of equal length
    logit_tokens: int | None = None  # number of tokens for which log-probs are computed; None: all
    # Weights, gradients and optimizer states on the device, by parts or as one number of bytes; None: those of an update.
    states: StateBytes | float | None = None
    other_bytes: float = 0.0  # device memory that other users hold during the step
    disk_bytes_per_s: float = 0.0  # rate of a disk for bytes that the host has no room for; 0: no disk
    optimizer_on_host: bool = False  # except during its step

    @property
    def decoder(self) -> Decoder:
        return self.own.decoder

    @property
    def _states(self) -> StateBytes:
        if isinstance(self.states, float | int):
            return StateBytes(self.states, 0.0, 0.0, self.own.update.gathered)
        return self.states or self.own.update

    @property
    def memory_parts(self) -> dict[str, float]:
        """Device memory by use [bytes]. `"activations"` is the rest of it, below 0 if the other parts do not fit."""
        whole, states = self.hardware.device_bytes, self._states
        parts: dict[str, float] = states._asdict()
        if isinstance(self.states, float | int):
            parts = {"states": self.states, "gathered": states.gathered}
        elif self.optimizer_on_host:
            del parts["optimizer"]
        if self.other_bytes:
            parts["others"] = self.other_bytes
        parts["reserve"] = whole * (1 - DEVICE_SHARE)
        return {**parts, "activations": whole - sum(parts.values())}

    @property
    def budget(self) -> Budget:
        link, room = self.hardware.link_bytes_per_s, self.memory_parts["activations"]
        return Budget(link, link, max(0, int(room)), max(0, int(self.host_bytes)), self.disk_bytes_per_s)

    @property
    def host_bytes(self) -> float:
        """Host memory for activations; below 0 if the host has no room for the optimizer's states."""
        return self.hardware.host_bytes - self._states.optimizer * self.optimizer_on_host

    def costs(self, tokens: int) -> list[LayerCost]:
        """Return the cost of each layer and, if log-probs are computed, of the head as a last layer."""
        how: dict[str, Any] = {"tile": self.own.tile, "shared_by": self.own.shared_by, "element": self.own.element}
        kinds = list(zip(self.decoder.windows, self.decoder.sparse, strict=True))
        of_kind = {
            kind: layer_cost(self.decoder, kinds.index(kind), tokens, self.hardware, self.sequences, **how)
            for kind in set(kinds)
        }
        costs = [of_kind[kind] for kind in kinds]
        if logits := self._own_logits(tokens):
            costs.append(head_cost(self.decoder, logits, self.hardware, self.own.element, not self.own.adapter_rank))
        return costs

    def _own_logits(self, tokens: int) -> int:
        """Return the number of tokens for which one accelerator computes log-probs."""
        logits = tokens if self.logit_tokens is None else min(tokens, self.logit_tokens)
        return -(-logits // self.own.shared_by)

    def plan(self, mode: str, tokens: int) -> Plan:
        """Return the plan for a number of tokens in one of `PLANNED_MODES`, or in mode `"all"`."""
        costs, budget = self.costs(tokens), self.budget
        if mode == "auto":
            return make_plan(costs, budget)
        if mode == "all":  # every saved tensor is offloaded, nothing is recomputed
            costs = [replace(cost, boundary_bytes=cost.saved_bytes, recompute_s=0.0) for cost in costs]
        layers = tuple(_of_mode(mode, cost) for cost in costs)
        # These modes fetch a layer late in the backward of the layer after it.
        return Plan(layers, (1,) * len(costs), predict(costs, layers, replace(budget, device_bytes=0)))

    def phases(self, plan: Plan) -> Phases:
        """Return the device memory by phase."""
        states, (forward, last, backward) = self._states, plan.prediction.peaks
        if self.logit_tokens == 0:
            backward, last = max(last, backward), 0
        passing = self._held_while_passing + states.gradients
        step = states.weights + states.gradients + self.other_bytes + step_bytes(states, self.optimizer_on_host)
        return Phases(passing + forward, passing + last if last else 0.0, passing + backward, step)

    @property
    def _held_while_passing(self) -> float:
        """Device memory during forward and backward, without activations and gradients [bytes]."""
        states = self._states
        return states.weights + states.gathered + states.optimizer * (not self.optimizer_on_host) + self.other_bytes

    def without_backward(self, tokens: int) -> float:
        """Return the peak device memory of a forward without backward and without gradients [bytes]."""
        one_of_each = {sparse: layer for layer, sparse in enumerate(self.decoder.sparse)}.values()
        own = -(-tokens // self.own.shared_by)
        working = [forward_bytes(self.decoder, layer, own, self.own.element, self.own.tile) for layer in one_of_each]
        head = head_forward_bytes(self.decoder, self._own_logits(tokens), self.own.element)
        return self._held_while_passing + max(*working, head)

    def fits(self, plan: Plan) -> bool:
        """Return whether device and host have room for a plan."""
        has_room = plan.prediction.host_bytes <= self.host_bytes
        return has_room and max(self.phases(plan)) <= self.hardware.device_bytes * DEVICE_SHARE

    def longest(self, mode: str) -> int:
        """Return the largest multiple of `STEP_TOKENS` tokens that fits in a mode."""
        return STEP_TOKENS * _last(lambda steps: self.fits(self.plan(mode, STEP_TOKENS * steps)))


class SamplerMemory(NamedTuple):
    """One process's part of the sampler [bytes]."""

    weights: float
    token_cache: float  # keys and values of one token
    is_vllm: bool
    share: float  # of a device's memory that vLLM takes
    is_freed: bool  # vLLM gives its memory back while a model works
    takes_adapters: bool  # and keeps its base
    processes: float = 0.0  # what several engines keep on the device at rest


@dataclass(frozen=True)
class RunMemory:
    """The models and the sampler of a run, and the memory of one process."""

    models: Mapping[str, ModelMemory]
    sampler: SamplerMemory
    on_device: bool  # with accelerators; otherwise all memory is the host's
    memory_bytes: float | None  # of a device, or a process's part of the host's; None: not known
    host_bytes: float | None  # a process's part of the host's
    hardware: Hardware  # gives plans their rates
    recorded_bytes: float = 0.0  # a process's part of the experts that the sampler recorded
    is_apart: bool = False  # whether the sampler has devices of its own

    def update(self, name: str, own: ModelMemory, load: Load) -> Phase:
        """Return the phase of an update."""
        states, others = own.on_device(own.update), self._idle(own) + self._sampler_at_rest
        moving = own.moving_state
        scenario = Scenario(
            own,
            replace(self.hardware, host_bytes=own.host_room + moving),
            logit_tokens=load.logits * own.shared_by,
            states=states._replace(optimizer=moving) if moving else states,
            other_bytes=others + own.staying_state * (moving > 0),
            disk_bytes_per_s=DISK_BYTES_PER_S * own.has_disk,
            optimizer_on_host=moving > 0,
        )
        plan = scenario.plan(own.mode, load.tokens * own.shared_by)
        offloaded = min(plan.prediction.host_bytes, own.host_room)
        peaks = scenario.phases(plan)._asdict()
        for where in ("forward", "head", "backward"):
            if peaks[where] > 0:  # a model without log-probs has no head
                peaks[where] += plan.prediction.host_bytes - offloaded  # the host has no room for it, so it stays
        where = max(peaks, key=lambda one: peaks[one])
        parts = _parts(own, states, others, peaks[where], is_gathered=where != "step")
        host = self._on_host(own) + offloaded * self.on_device
        return self._phase(
            name,
            parts,
            host,
            where="optimizer step" if where == "step" else where,
            disk=plan.prediction.disk_bytes,
        )

    def forward(self, name: str, own: ModelMemory, load: Load) -> Phase:
        """Return a phase without backward."""
        states, others = own.on_device(own.forward), self._idle(own) + self._sampler_at_rest
        held = states._replace(optimizer=own.staying_state)
        scenario = Scenario(own, self.hardware, 1, load.logits * own.shared_by, held, others)
        peak = scenario.without_backward(load.tokens * own.shared_by)
        return self._phase(name, _parts(own, states, others, peak, is_gathered=True), self._on_host(own))

    def rollout(self, length: int, sequences: int) -> Phase:
        """Return the phase of generation, of so many sequences at once with transformers' sampler."""
        sampler, lacking, limit = self.sampler.weights, 0.0, self._limit
        cache = length * self.sampler.token_cache
        if not self.sampler.is_vllm:
            sampler += cache * sequences
        elif not self.on_device:
            sampler, lacking = sampler + CPU_CACHE_BYTES, max(0.0, cache - CPU_CACHE_BYTES)
        elif self.memory_bytes is None:
            sampler += cache
        else:
            needed = sampler + self.sampler.processes + cache
            sampler = self.sampler.share * self.memory_bytes
            limit, lacking = self.memory_bytes - CUDA_BYTES, max(0.0, needed - sampler)
        parts, host = {"others": self._idle(), "sampler": sampler}, self._on_host()
        if self.is_apart:
            parts, host = {"sampler": sampler}, 0.0
        return self._phase("rollout", parts, host, lacking=lacking)._replace(limit=limit)

    def sync(self, actor: ModelMemory) -> Phase:
        """Return the phase in which the sampler takes the policy's weights."""
        states, at_rest = actor.on_device(actor.forward), self._sampler_at_rest
        parts = {
            "others": self._idle(actor),
            "weights": states.weights,
            "optimizer": actor.staying_state,
            "gathered": float(actor.stored * actor.decoder.vocabulary * actor.decoder.width),
            "sampler": 0.0 if self.is_apart else max(self.sampler.weights + self.sampler.processes, at_rest),
        }
        if self.sampler.takes_adapters:
            gathering = parts | {"gathered": 0.0, "sampler": at_rest}
            loading = parts | {"gathered": 0.0, "weights": actor.device_at_rest, "optimizer": 0.0}
            parts = max(gathering, loading, key=lambda each: sum(each.values()))
        return self._phase("sync", parts, self._on_host(actor))

    def _phase(self, name: str, parts: dict[str, float], host: float, **others: Any) -> Phase:
        return Phase(name, parts, self._limit, host, self.host_bytes, **others)

    @property
    def _limit(self) -> float | None:
        return None if self.memory_bytes is None else self.memory_bytes * DEVICE_SHARE

    @property
    def _sampler_at_rest(self) -> float:
        """Bytes of the sampler on the device while a model works."""
        sampler = self.sampler
        if self.is_apart:
            return 0.0
        if not sampler.is_vllm:
            return sampler.weights
        if not self.on_device:
            return sampler.weights + CPU_CACHE_BYTES
        return sampler.processes if sampler.is_freed else sampler.share * (self.memory_bytes or 0.0)

    def _idle(self, own: ModelMemory | None = None) -> float:
        """Return the bytes on the device of all models but the working one."""
        return sum(each.device_at_rest for each in self.models.values() if each is not own)

    def _on_host(self, own: ModelMemory | None = None) -> float:
        """Return the bytes on the host while one model works, activations aside; by default while none does."""
        idle = sum(each.host_at_rest for each in self.models.values() if each is not own)
        idle += self.recorded_bytes * self.on_device
        if own is None:
            return idle
        keeps_base = (
            not self.is_apart
            and self.sampler.is_vllm
            and self.on_device
            and self.sampler.is_freed
            and self.sampler.takes_adapters
        )
        return idle + own.host_at_work + PINNED_ROUNDING * self.sampler.weights * keeps_base


def _parts(own: ModelMemory, states: StateBytes, others: float, peak: float, is_gathered: bool) -> dict[str, float]:
    parts = {
        "others": others,
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": own.staying_state,
        "gathered": states.gathered * is_gathered,
    }
    return {**parts, "working": peak - sum(parts.values())}


def _of_mode(mode: str, cost: LayerCost) -> LayerPlan:
    if mode == "attention":
        return LayerPlan(off_device=frozenset(i for i, op in enumerate(cost.operations) if op.name in _ATTENTION))
    return LayerPlan(keep=mode == "plain", offload_boundary=mode != "checkpointing")


def _last(holds: Callable[[int], bool]) -> int:
    """Return the largest number for which a property holds; it must also hold for all smaller numbers."""
    above = 1
    while holds(above):
        above *= 2
    return bisect_left(range(above), True, lo=above // 2 + 1, key=lambda number: not holds(number)) - 1
