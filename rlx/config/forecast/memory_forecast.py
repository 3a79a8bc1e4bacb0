"""Forecast the memory of each phase of a step, on one device and on the host, before anything is loaded.

The formulas are those of `rlx.offload.plan` (docs/planning.md). In each phase a device holds:

- for each idle role: weights and optimizer state, unless they are on the host (`param_offload`, `optimizer_offload`,
  `offload_policy`, frozen layers with `layer_offload`);
- for the working role: weights (with `layer_offload` those of two layers), the weights that FSDP gathers, the activations of one
  micro-batch, in an update the gradients, and the optimizer state unless it is on the host;
- for the sampler: vLLM's share while it is awake, or with `rollout.name=hf` a copy of the weights and its cache.

A vLLM that takes adapters alone keeps its base in host memory while it sleeps.

A micro-batch counts as full of sequences of full length (`data.max_prompt_length` + `data.max_response_length`). The host
holds at most the states named above, the offloaded activations and the experts that the sampler recorded, not all at once.
Without an accelerator all memory is the host's.

Phases have the names of the run's metrics. The memory of an update is the largest of forward, head, backward and optimizer step.
With `save=auto` it is the least possible; a run uses more if that is faster and there is room. `sync` holds the sampler's
weights, the actor, and the actor's largest tensor in one piece; adapters alone are gathered first, and the actor rests when the
sampler wakes.

Not counted: CUDA, NCCL and the allocator (6 % of a device are reserved for them); Python and torch on the host; the head's
gradient, which FSDP keeps whole until backward ends; prefill of `rollout.name=hf`; staging memory of a disk.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from rlx.config.forecast.decoders import Known, decoders
from rlx.config.forecast.role_memory import (
    CPU_CACHE_BYTES,
    RoleMemory,
    SamplerMemory,
    load,
    role_memories,
    sampler_memory,
)
from rlx.config.machine import Machine, on_accelerator, processes
from rlx.config.schema import ModelConfig, PPOConfig, RefConfig, RolloutConfig
from rlx.config.schema.roles import has_reference, has_reference_model, log_prob_size, trained_roles
from rlx.config.schema.tree import value_at, with_value
from rlx.offload.plan.hardware import DEVICE_SHARE, PROFILES, Hardware
from rlx.offload.plan.memory import StateBytes
from rlx.offload.plan.scenario import Scenario
from rlx.offload.runtime.options import DEFAULT_SAVE

REFUSED_FROM = 1.1  # times the usable memory; measured runs were within 3 % of the formulas (docs/planning.md)


class Phase(NamedTuple):
    """The most memory that one process needs in a phase [bytes]."""

    name: str
    parts: dict[str, float]  # of the peak: others, weights, gradients, optimizer, gathered, working, sampler
    limit: float | None  # of the parts' sum; None: not known
    host: float  # states and activations of all roles in host memory
    host_limit: float | None
    where: str = ""  # the part of the phase that reaches the peak; empty if the phase has one part only
    disk: float = 0.0  # activations on disk
    lacking: float = 0.0  # bytes that the sampler's share lacks for one sequence

    @property
    def peak(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    def fits(self, margin: float = 1.0) -> bool:
        """Whether the phase fits into `margin` times the memory of device, host and sampler."""
        return self.fits_device(margin) and self.fits_host(margin)

    def fits_device(self, margin: float = 1.0) -> bool:
        """Whether the peak fits into `margin` times its limit, and a sequence into that of the sampler's share."""
        has_room = self.limit is None or self.peak <= self.limit * margin
        return has_room and self.lacking <= self.parts.get("sampler", 0.0) * (margin - 1)

    def fits_host(self, margin: float = 1.0) -> bool:
        """Whether `host` fits into `margin` times its limit."""
        return self.host_limit is None or self.host <= self.host_limit * margin


CUDA_BYTES = 2e9  # on a device, outside vLLM's share, which has a reserve of its own
LENGTH_STEP = 64  # tokens; the longest sequence is found to this precision
LONGEST = 1 << 24  # tokens; the search for the longest sequence ends here
NO_LIMIT = 1 << 60
DISK_BYTES_PER_S = 2e9  # any value: the split between tiers does not depend on it

OF_ROLE = {
    "rollout": "actor",
    "reward": "reward",
    "old_log_prob": "actor",
    "ref": "ref",
    "values": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
    "sync": "actor",
}
"""The phases in the order of a step, each with the role whose model it needs; with adapters `ref` needs the actor's."""


@dataclass(frozen=True)
class MemoryForecast:
    """The phases of a configuration on a machine."""

    config: PPOConfig
    machine: Machine
    known: Mapping[str, Known]  # the shape of each role's model; a role of unknown shape counts as 0 bytes

    @classmethod
    def of(cls, config: PPOConfig, machine: Machine) -> "MemoryForecast":
        """Return the forecast with the shapes that this machine's files give."""
        return cls(config, machine, decoders(config))

    def changed(self, config: PPOConfig) -> "MemoryForecast":
        """Return the forecast of another configuration for the same models and machine."""
        return MemoryForecast(config, self.machine, self.known)

    @property
    def unknown(self) -> dict[str, str]:
        """The roles of unknown memory, each with the reason."""
        return {name: found for name, found in self.known.items() if isinstance(found, str)}

    @cached_property
    def on_device(self) -> bool:
        """Whether the run uses accelerators; otherwise all memory is the host's."""
        return on_accelerator(self.config, self.machine)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence that the configuration allows."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    @property
    def memory_bytes(self) -> float | None:
        """The memory of a process's device, or without accelerators its part of the host's [bytes]; None if not known."""
        return self.machine.device_bytes if self.on_device else self.host_bytes

    @property
    def host_bytes(self) -> float | None:
        """The host's memory divided by its processes [bytes]; None if not known."""
        whole = self.machine.host_bytes
        return None if whole is None else whole / self.config.trainer.n_gpus_per_node

    @cached_property
    def _memories(self) -> dict[str, RoleMemory]:
        return role_memories(self.config, self.machine, dict(self.known))

    @cached_property
    def _sampler(self) -> SamplerMemory:
        return sampler_memory(self.config, self._memories.get("actor"), self.on_device, self.memory_bytes)

    @property
    def streaming(self) -> list[RoleMemory]:
        """The roles whose frozen layers wait on the host."""
        return [memory for memory in self._memories.values() if memory.streamed]

    def decided(self, length: int | None = None, is_least: bool = False) -> "MemoryForecast":
        """Return the forecast with `optimizer_state=auto` replaced by what all phases leave free on the device.

        Without an accelerator that is `device`; for a model or device of unknown size it is `host`. The actor is served first.
        """
        keys = {role.name: f"{role.fsdp_key}.optimizer_state" for role in trained_roles(self.config)}
        keys = {name: key for name, key in keys.items() if value_at(self.config, key) == "auto"}
        if not keys:
            return self

        def phases(values: dict[str, Any]) -> tuple[MemoryForecast, list[Phase]]:
            config = self.config
            for key, value in values.items():
                config = with_value(config, key, value)
            forecast = self.changed(config)
            return forecast, [forecast.phase(name, length, is_least) for name in forecast.names]

        whole, of_whole = phases(dict.fromkeys(keys.values(), "device"))
        if not self.on_device:
            return whole
        moving, of_moving = phases(dict.fromkeys(keys.values(), "host"))
        if self.unknown or self.memory_bytes is None:
            return moving
        if all(phase.fits_device() for phase in of_whole):
            return whole
        free = int(max(0.0, min((phase.limit or 0.0) - phase.peak for phase in of_moving)))
        split = {}
        for name, key in keys.items():
            split[key] = min(free, int(self._memories[name].update.optimizer))
            free -= split[key]
        return phases(split)[0]

    def split_states(self) -> list[tuple[str, float, float]]:
        """Return the roles whose optimizer state is not all on the device, with the bytes that stay there and the others."""
        memories = self._memories.items()
        return [(name, own.staying_state, own.moving_state) for name, own in memories if own.moving_state]

    # Phases -------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The phases of the run whose models are known."""
        found = [name for name in OF_ROLE if self._role_of(name) in self._memories]
        return found if has_reference(self.config) else [name for name in found if name != "ref"]

    def _role_of(self, phase: str) -> str:
        return "actor" if phase == "ref" and not has_reference_model(self.config) else OF_ROLE[phase]

    def phases(self, is_least: bool = False) -> list[Phase]:
        """Return all phases, for sequences of the configured length; `is_least` as for `phase`."""
        return [self.phase(name, is_least=is_least) for name in self.names]

    def phase(self, name: str, length: int | None = None, is_least: bool = False) -> Phase:
        """Return the forecast of one phase for the longest sequences, by default of the configured length [tokens].

        With `is_least` it counts only memory that is certain: one sample of this length if only the number of packed samples is
        limited, or if transformers decodes several at once.
        """
        if (decided := self.decided(length, is_least)) is not self:
            return decided.phase(name, length, is_least)
        own, longest = self._memories[self._role_of(name)], self.length if length is None else length
        if name == "rollout":
            return self._rollout(longest, is_least)
        if name == "sync":
            return self._sync(own)
        if name.startswith("update_"):
            return self._update(name, own, longest, is_least)
        return self._forward(name, own, longest, is_least)

    def longest(self, name: str) -> int | None:
        """Return the longest sequences, to 64 tokens, with which a phase fits under these settings; None if any fit."""
        lengths = range(LENGTH_STEP, LONGEST + 1, LENGTH_STEP)
        fitting = bisect_left(lengths, True, key=lambda length: not self.phase(name, length).fits())
        return None if fitting == len(lengths) else fitting * LENGTH_STEP

    def oversized(self, is_least: bool = False, margin: float = 1.0) -> list[Phase]:
        """Return the phases that do not fit; arguments as for `phase` and `Phase.fits`."""
        return [phase for phase in self.phases(is_least) if not phase.fits(margin)]

    # Each kind ----------------------------------------------------------------------------------------------------

    def _update(self, name: str, own: RoleMemory, length: int, is_least: bool) -> Phase:
        role = own.role
        tokens, logits = load(own, self.config, role.micro, role.mini_batch_prompts, length, is_least)
        host_room, disk = self._places(role.model)
        states, others = own.on_device(own.update), self._idle(own) + self._sampler.at_rest
        moving = own.moving_state
        held = states._replace(optimizer=moving) if moving else states
        scenario = self._scenario(own, logits)._replace(
            states=held,
            other_bytes=others + own.staying_state * (moving > 0),
            disk_bytes_per_s=DISK_BYTES_PER_S * disk,
            hardware=replace(self._hardware, host_bytes=host_room + moving),
        )
        plan = scenario.plan(_mode(role.model), tokens * role.sequence_parallel_size)
        offloaded = min(plan.prediction.host_bytes, host_room)
        peaks = scenario.phases(plan)._asdict()
        for where in ("forward", "head", "backward"):
            if peaks[where] > 0:  # a model without log-probs has no head
                peaks[where] += plan.prediction.host_bytes - offloaded  # the host has no room for it, so it stays
        where = max(peaks, key=lambda one: peaks[one])
        parts = _parts(own, states, others, peaks[where], is_gathered=where != "step")
        host = self._on_host(own) + offloaded * self.on_device
        where = "optimizer step" if where == "step" else where
        return self._phase(name, parts, host, where=where, disk=plan.prediction.disk_bytes)

    def _forward(self, name: str, own: RoleMemory, length: int, is_least: bool) -> Phase:
        policy, prompts = self.config.actor_rollout_ref, self.config.data.train_batch_size
        of_phase: dict[str, RolloutConfig | RefConfig] = {"old_log_prob": policy.rollout, "ref": policy.ref}
        micro = log_prob_size(of_phase[name], policy.actor) if name in of_phase else own.role.micro
        tokens, logits = load(own, self.config, micro, prompts, length, is_least)
        states, others = own.on_device(own.forward), self._idle(own) + self._sampler.at_rest
        held = states._replace(optimizer=own.staying_state)
        scenario = self._scenario(own, logits)._replace(states=held, other_bytes=others, optimizer_on_host=False)
        parts = _parts(
            own, states, others, scenario.without_backward(tokens * own.role.sequence_parallel_size), is_gathered=True
        )
        return self._phase(name, parts, self._on_host(own))

    def _rollout(self, length: int, is_least: bool) -> Phase:
        rollout, lacking, limit = self.config.actor_rollout_ref.rollout, 0.0, self._limit
        weights, cache = self._sampler.weights, length * self._sampler.token_cache
        if rollout.name == "hf":
            rows = -(-self.config.data.train_batch_size * rollout.n // processes(self.config))
            sampler = weights + cache * (1 if is_least else min(rollout.max_num_seqs, rows))
        elif not self.on_device:
            sampler, lacking = weights + CPU_CACHE_BYTES, max(0.0, cache - CPU_CACHE_BYTES)
        elif self.memory_bytes is None:
            sampler = weights + cache
        else:
            sampler, limit = rollout.gpu_memory_utilization * self.memory_bytes, self.memory_bytes - CUDA_BYTES
            lacking = max(0.0, weights + cache - sampler)
        parts = {"others": self._idle(), "sampler": sampler}
        return self._phase("rollout", parts, self._on_host(), lacking=lacking)._replace(limit=limit)

    def _sync(self, actor: RoleMemory) -> Phase:
        states, sampler = actor.on_device(actor.forward), self._sampler
        parts = {
            "others": self._idle(actor),
            "weights": states.weights,
            "optimizer": actor.staying_state,
            "gathered": float(actor.stored * actor.decoder.vocabulary * actor.decoder.width),
            "sampler": max(sampler.weights, sampler.at_rest),
        }
        if self.config.actor_rollout_ref.model.sends_adapters:
            gathering = parts | {"gathered": 0.0, "sampler": sampler.at_rest}
            loading = parts | {"gathered": 0.0, "weights": actor.device_at_rest, "optimizer": 0.0}
            parts = max(gathering, loading, key=lambda each: sum(each.values()))
        return self._phase("sync", parts, self._on_host(actor))

    def _phase(self, name: str, parts: dict[str, float], host: float, **others: Any) -> Phase:
        return Phase(name, parts, self._limit, host, self.host_bytes, **others)

    # Shared by the phases -----------------------------------------------------------------------------------------

    @property
    def _limit(self) -> float | None:
        return None if self.memory_bytes is None else self.memory_bytes * DEVICE_SHARE

    @property
    def _hardware(self) -> Hardware:
        """The rates that plans count with; the H200's where the machine's are not known."""
        return self.machine.hardware or PROFILES["h200"]

    def _scenario(self, own: RoleMemory, logits: int) -> Scenario:
        model, shared_by = own.role.model, own.role.sequence_parallel_size
        tile = None if model.tiled_mlp == 0 else 0 if model.tiled_mlp == "auto" else int(model.tiled_mlp)
        return Scenario(
            decoder=own.decoder,
            hardware=self._hardware,
            logit_tokens=logits * shared_by,
            is_head_trained=model.lora_rank == 0,
            tile=tile,
            shared_by=shared_by,
            optimizer_on_host=own.moving_state > 0,
            element=own.element,
        )

    def _places(self, model: ModelConfig) -> tuple[int, bool]:
        """Return the host's limit of offloaded bytes, and whether a disk takes the excess, which else stays on the device."""
        options = model.activation_offload
        if options.tier == "disk":
            return 0, True
        if not self.on_device:
            return 0, False  # activations are in host memory already
        cap = options.max_host_bytes
        return (NO_LIMIT, False) if cap is None else (cap, options.directory is not None)

    def _idle(self, own: RoleMemory | None = None) -> float:
        """Return the bytes on the device of all roles but the working one."""
        return sum(each.device_at_rest for each in self._memories.values() if each is not own)

    def _on_host(self, own: RoleMemory | None = None) -> float:
        """Return the bytes on the host while one role works, activations aside; by default while none does."""
        idle = sum(each.host_at_rest for each in self._memories.values() if each is not own)
        idle += self._recorded_experts * self.on_device
        return idle + (0.0 if own is None else own.host_at_work + self._sampler.host_at_rest)

    @property
    def _recorded_experts(self) -> float:
        """Bytes of the batch's column `routed_experts`, divided by the processes of the machine that holds it."""
        rollout, actor = self.config.actor_rollout_ref.rollout, self._memories.get("actor")
        if not rollout.enable_rollout_routing_replay or actor is None:
            return 0.0
        tokens = self.config.data.train_batch_size * rollout.n * self.length
        return tokens * actor.decoder.recorded_bytes / self.config.trainer.n_gpus_per_node


def _mode(model: ModelConfig) -> str:
    """Return the planner's name for the activation mode; `auto` counts as its mode with the least memory."""
    recomputes, save = model.enable_gradient_checkpointing, model.activation_offload.save
    if not model.enable_activation_offload:
        return "checkpointing" if recomputes else "plain"
    save = save or DEFAULT_SAVE[recomputes]
    return save if save in ("attention", "all") else "boundary"


def _parts(own: RoleMemory, states: StateBytes, others: float, peak: float, is_gathered: bool) -> dict[str, float]:
    parts = {
        "others": others,
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": own.staying_state,
        "gathered": states.gathered * is_gathered,
    }
    return {**parts, "working": peak - sum(parts.values())}
