"""Forecast the memory of each phase of a step, on one device and on the host, before anything is loaded.

The formulas are those of `rlx.offload.plan` (docs/planning.md). In each phase a device holds:

- for each idle role: weights and optimizer state, unless they are on the host (`param_offload`, `optimizer_offload`,
  `offload_policy`);
- for the working role: weights, the weights that FSDP gathers, the activations of one micro-batch, in an update the gradients,
  and the optimizer state unless it is on the host;
- for the sampler: vLLM's share while it is awake, or with `rollout.name=hf` a copy of the weights and its cache.

A micro-batch counts as full of sequences of full length (`data.max_prompt_length` + `data.max_response_length`). The host
holds at most the states named above and the offloaded activations, not all at once. Without an accelerator all memory is the
host's.

Phases have the names of the run's metrics. The memory of an update is the largest of forward, head, backward and optimizer step.
With `save=auto` it is the least possible; a run uses more if that is faster and there is room. `sync` holds the sampler's
weights, the actor, and the actor's largest tensor in one piece.

Not counted: CUDA, NCCL and the allocator (6 % of a device are reserved for them); Python and torch on the host; the head's
gradient, which FSDP keeps whole until backward ends; prefill of `rollout.name=hf`; staging memory of a disk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rlx.config.forecast.decoders import Known, decoders
from rlx.config.forecast.role_memory import BYTES, RoleMemory, load, role_memories
from rlx.config.machine import Machine, on_accelerator, processes
from rlx.config.schema import ModelConfig, PPOConfig
from rlx.config.schema.roles import MicroSize, log_prob_size
from rlx.offload.plan.hardware import DEVICE_SHARE, PROFILES
from rlx.offload.plan.memory import StateBytes
from rlx.offload.plan.scenario import Scenario
from rlx.offload.runtime.options import DEFAULT_SAVE

CUDA_BYTES = 2e9  # on a device, outside vLLM's share, which has a reserve of its own
CPU_CACHE_BYTES = 1 << 30  # vLLM's on a CPU
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
"""The phases in the order of a step, each with the role whose model it needs."""


class Phase(NamedTuple):
    """The most memory that one process needs in a phase [bytes].

    Args:
        name: of the phase.
        parts: of the peak: others, weights, gradients, optimizer, gathered, working, sampler.
        limit: of the parts' sum; None: not known.
        where: the part of the phase that reaches the peak; empty if the phase has one part only.
        host: states and activations of all roles in host memory.
        disk: activations on disk.
        lacking: bytes that the sampler's share lacks for one sequence.
    """

    name: str
    parts: dict[str, float]
    limit: float | None
    where: str = ""
    host: float = 0.0
    disk: float = 0.0
    lacking: float = 0.0

    @property
    def peak(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryForecast:
    """The phases of a configuration on a machine.

    Args:
        config: the tree.
        machine: where the run takes place.
        known: the shape of each role's model; a role of unknown shape counts as 0 bytes.
    """

    config: PPOConfig
    machine: Machine
    known: Mapping[str, Known]

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

    # Phases -------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The phases of the run whose models are known."""
        return [name for name, role in OF_ROLE.items() if role in self._memories]

    def phases(self, is_least: bool = False) -> list[Phase]:
        """Return all phases, for sequences of the configured length; `is_least` as for `phase`."""
        return [self.phase(name, is_least=is_least) for name in self.names]

    def phase(self, name: str, length: int | None = None, is_least: bool = False) -> Phase:
        """Return the forecast of one phase.

        Args:
            name: of `names`.
            length: tokens of the longest sequences; None: the configured length.
            is_least: count only the memory that is certain: one sample of this length if only the number of packed samples is
                limited, or if transformers decodes several at once.
        """
        longest = self.length if length is None else length
        own, batch = self._memories[OF_ROLE[name]], self.config.data.train_batch_size
        if name == "rollout":
            return self._rollout(own, longest, is_least)
        if name == "sync":
            return self._sync(own)
        if name.startswith("update_"):
            return self._update(name, own, longest, is_least)
        policy = self.config.actor_rollout_ref
        micro = log_prob_size(policy.rollout, policy.actor) if name == "old_log_prob" else own.role.micro
        return self._forward(name, own, micro, batch, longest, is_least)

    def longest(self, name: str) -> int | None:
        """Return the longest sequences, to 64 tokens, with which a phase fits under these settings; None if any fit."""

        def fits(steps: int) -> bool:
            return self.fits(self.phase(name, steps * LENGTH_STEP))

        below, above = 0, LONGEST // LENGTH_STEP
        if fits(above):
            return None
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if fits(middle) else (below, middle)
        return below * LENGTH_STEP

    def fits(self, phase: Phase, margin: float = 1.0) -> bool:
        """Whether a phase fits into `margin` times the memory of device, host and sampler."""
        has_room = phase.limit is None or phase.peak <= phase.limit * margin
        return (
            has_room
            and phase.lacking <= phase.parts.get("sampler", 0.0) * (margin - 1)
            and self.fits_host(phase, margin)
        )

    def oversized(self, is_least: bool = False, margin: float = 1.0) -> list[Phase]:
        """Return the phases that do not fit; arguments as for `phase` and `fits`."""
        return [phase for phase in self.phases(is_least) if not self.fits(phase, margin)]

    def fits_host(self, phase: Phase, margin: float = 1.0) -> bool:
        """Whether the phase's `host` fits into `margin` times the host's memory."""
        return self.host_bytes is None or phase.host <= self.host_bytes * margin

    # Each kind ----------------------------------------------------------------------------------------------------

    def _update(self, name: str, own: RoleMemory, length: int, is_least: bool) -> Phase:
        role, on_host = own.role, own.optimizer_on_host
        tokens, logits = load(own, self.config, role.micro, role.mini_batch_prompts, length, is_least)
        host_room, disk = self._places(role.model)
        states, others = own.on_device(own.update), self._others(own)
        setting = self._setting(own, logits)._replace(
            states=states,
            other_bytes=others,
            disk_bytes_per_s=DISK_BYTES_PER_S * disk,
            hardware=replace(PROFILES["h200"], host_bytes=host_room + states.optimizer * on_host),
        )
        plan = setting.plan(_mode(role.model), tokens * role.together)
        sent = plan.prediction.host_bytes
        stays = max(0, sent - host_room)
        peaks = setting.phases(plan)._asdict()
        peaks = {where: peak + stays * (where != "step" and peak > 0) for where, peak in peaks.items()}
        where = max(peaks, key=lambda one: peaks[one])
        parts = _parts(states, others, 0.0 if on_host else states.optimizer, where != "step")
        parts["working"] = peaks[where] - sum(parts.values())
        host = (self._host_at_rest(own) + own.host_at_work + sent - stays) * self.on_device
        return Phase(name, parts, self._limit, WHERE.get(where, where), host, plan.prediction.disk_bytes)

    def _forward(
        self, name: str, own: RoleMemory, micro: MicroSize, prompts: int, length: int, is_least: bool
    ) -> Phase:
        tokens, logits = load(own, self.config, micro, prompts, length, is_least)
        states, others = own.on_device(own.forward), self._others(own)
        setting = self._setting(own, logits)._replace(states=states, other_bytes=others)
        peak = setting.without_backward(tokens * own.role.together)
        parts = _parts(states, others, 0.0 if own.optimizer_on_host else states.optimizer, is_gathered=True)
        parts["working"] = peak - sum(parts.values())
        return Phase(name, parts, self._limit, host=self._host_at_rest(own) + own.host_at_work)

    def _rollout(self, actor: RoleMemory, length: int, is_least: bool) -> Phase:
        others = sum(each.device_at_rest for each in self._memories.values())
        host_at_rest, weights = self._host_at_rest(None), self._sampler_weights(actor)
        rollout, lacking, limit = self.config.actor_rollout_ref.rollout, 0.0, self._limit
        cache = length * self._cache_bytes(actor)
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
        return Phase("rollout", {"others": others, "sampler": sampler}, limit, host=host_at_rest, lacking=lacking)

    def _sync(self, actor: RoleMemory) -> Phase:
        others = sum(each.device_at_rest for each in self._memories.values() if each is not actor)
        states = actor.on_device(actor.forward)
        parts = {
            "others": others,
            "weights": states.weights,
            "optimizer": 0.0 if actor.optimizer_on_host else states.optimizer,
            "gathered": float(actor.stored * actor.decoder.vocabulary * actor.decoder.width),
            "sampler": max(self._sampler_weights(actor), self._sampler_at_rest()),
        }
        return Phase("sync", parts, self._limit, host=self._host_at_rest(actor) + actor.host_at_work)

    # Shared by the phases ----------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> float | None:
        return None if self.memory_bytes is None else self.memory_bytes * DEVICE_SHARE

    def _setting(self, own: RoleMemory, logits: int) -> Scenario:
        model, together = own.role.model, own.role.together
        tile = None if model.tiled_mlp == 0 else 0 if model.tiled_mlp == "auto" else int(model.tiled_mlp)
        return Scenario(
            decoder=own.decoder,
            hardware=PROFILES["h200"],
            logit_tokens=logits * together,
            is_head_trained=model.lora_rank == 0,
            tile=tile,
            shared_by=together,
            optimizer_on_host=own.optimizer_on_host,
            element=own.element,
        )

    def _places(self, model: ModelConfig) -> tuple[int, bool]:
        """Return the host's limit of offloaded bytes, and whether a disk takes the excess; otherwise it stays on the device."""
        options = model.activation_offload
        if options.tier == "disk":
            return 0, True
        if not self.on_device:
            return 0, False  # activations are in host memory already
        cap = options.max_host_bytes
        return (NO_LIMIT, False) if cap is None else (cap, options.directory is not None)

    def _others(self, own: RoleMemory) -> float:
        """Return the bytes of the other roles and of the sampler on the device while one role works."""
        return sum(each.device_at_rest for each in self._memories.values() if each is not own) + self._sampler_at_rest()

    def _host_at_rest(self, own: RoleMemory | None) -> float:
        """Return the bytes of all roles but one on the host."""
        return sum(each.host_at_rest for each in self._memories.values() if each is not own)

    def _sampler_at_rest(self) -> float:
        rollout, actor = self.config.actor_rollout_ref.rollout, self._memories.get("actor")
        weights = 0.0 if actor is None else self._sampler_weights(actor)
        if rollout.name == "hf":
            return weights
        if not self.on_device:
            return weights + CPU_CACHE_BYTES
        return 0.0 if rollout.free_cache_engine else rollout.gpu_memory_utilization * (self.memory_bytes or 0.0)

    def _sampler_weights(self, actor: RoleMemory) -> float:
        return actor.decoder.parameters * self._sampler_element / self._ranks

    def _cache_bytes(self, actor: RoleMemory) -> float:
        """Return the bytes of the keys and values of one token."""
        decoder = actor.decoder
        heads = max(1.0, decoder.kv_heads / self._ranks)
        return 2 * len(decoder.windows) * heads * decoder.head_width * self._sampler_element

    @property
    def _ranks(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return 1 if rollout.name == "hf" else rollout.tensor_model_parallel_size

    @property
    def _sampler_element(self) -> int:
        dtype = self.config.actor_rollout_ref.rollout.dtype
        return (2 if self.on_device else 4) if dtype == "auto" else BYTES[dtype]


WHERE = {"step": "optimizer step"}


def _mode(model: ModelConfig) -> str:
    """Return the planner's name for the activation mode; `auto` counts as its mode with the least memory."""
    recomputes, save = model.enable_gradient_checkpointing, model.activation_offload.save
    if not model.enable_activation_offload:
        return "checkpointing" if recomputes else "plain"
    save = save or DEFAULT_SAVE[recomputes]
    return save if save in ("attention", "all") else "inputs to the host"


def _parts(states: StateBytes, others: float, optimizer: float, is_gathered: bool) -> dict[str, float]:
    parts = {"others": others, "weights": states.weights, "gradients": states.gradients}
    return parts | {"optimizer": optimizer, "gathered": states.gathered * is_gathered}
