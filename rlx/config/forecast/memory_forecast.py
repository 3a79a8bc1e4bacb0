"""Translate a configuration into the sizes that `rlx.offload.plan.run_memory` predicts from, before anything is loaded.

A micro-batch counts as full of sequences of full length (`data.max_prompt_length` + `data.max_response_length`). Phases have the
names of the run's metrics. With `save=auto` an update counts with the least memory; a run uses more if that is faster and there is room.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

from rlx.config.forecast.decoders import Known, decoders
from rlx.config.forecast.engine_count import EngineCount, engine_count
from rlx.config.machine import Machine, on_accelerator, processes
from rlx.config.schema import DataConfig, ModelConfig, PPOConfig, RefConfig, RolloutConfig, roles
from rlx.config.schema.roles import MicroSize, ModelRole
from rlx.config.schema.tree import value_at, with_value
from rlx.config.vllm_range import ENGINE_BYTES
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.hardware import PROFILES
from rlx.offload.plan.memory import ADAPTER_BYTES
from rlx.offload.plan.run_memory import NO_LIMIT, Load, ModelMemory, Phase, RunMemory, SamplerMemory
from rlx.offload.runtime.options import DEFAULT_SAVE

REFUSED_FROM = 1.1  # times the usable memory; measured runs were within 3 % of the formulas (docs/planning.md)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MANY_TURNS = 1024  # of a conversation without a limit: the size of micro-batches decides
LENGTH_STEP = 64  # tokens; the longest sequence is found to this precision
LONGEST = 1 << 24  # tokens; the search for the longest sequence ends here

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

ENGINES = "actor_rollout_ref.rollout.engines_per_gpu"
WHOLE_SHARE = 0.15  # of a device's memory, which weights and gradients of a model may take that stays gathered


@dataclass(frozen=True)
class MemoryForecast:
    """The phases of a configuration on a machine."""

    config: PPOConfig
    machine: Machine
    known: Mapping[str, Known]  # the shape of each role's model; a role of unknown shape counts as 0 bytes

    @classmethod
    def of(cls, config: PPOConfig, machine: Machine) -> "MemoryForecast":
        return cls(config, machine, decoders(config))

    @property
    def unknown(self) -> dict[str, str]:
        return {name: found for name, found in self.known.items() if isinstance(found, str)}

    @cached_property
    def on_device(self) -> bool:
        return on_accelerator(self.config, self.machine)

    @property
    def length(self) -> int:
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    @property
    def host_bytes(self) -> float | None:
        """The host's memory divided by its processes, on a device by those that train [bytes]; None if not known."""
        whole, trainer = self.machine.host_bytes, self.config.trainer
        count = trainer.n_gpus_per_node if self.on_device else trainer.processes_per_node
        return None if whole is None else whole / count

    @property
    def memory_bytes(self) -> float | None:
        """The memory of a process's device, or without accelerators its part of the host's [bytes]; None if not known."""
        return self.machine.device_bytes if self.on_device else self.host_bytes

    @cached_property
    def roles(self) -> dict[str, ModelRole]:
        return {role.name: role for role in roles.sharded_roles(self.config) if role.name not in self.unknown}

    @cached_property
    def run(self) -> RunMemory:
        known = {name: found for name, found in self.known.items() if isinstance(found, Decoder)}
        models = {name: self._model(role, known[name]) for name, role in self.roles.items()}
        rollout = self.config.actor_rollout_ref.rollout
        actor, recorded = known.get("actor"), 0.0
        if rollout.enable_rollout_routing_replay and actor is not None:
            tokens = self.config.data.train_batch_size * rollout.n * self.length
            recorded = tokens * actor.recorded_bytes / self.config.trainer.n_gpus_per_node
        return RunMemory(
            models,
            self._sampler(actor),
            on_device=self.on_device,
            memory_bytes=self.memory_bytes,
            host_bytes=self.host_bytes,
            hardware=self.machine.hardware or PROFILES["h200"],
            recorded_bytes=recorded,
            is_apart=self.config.trainer.n_rollout_gpus > 0,
        )

    @cached_property
    def engines(self) -> EngineCount:
        """vLLM's engines on each GPU; `auto` leaves the other phases their memory."""
        found = engine_count(self.config, self.machine, self.known.get("actor"))
        if self.config.actor_rollout_ref.rollout.engines_per_gpu != "auto" or found.per_gpu == 1:
            return found
        one, several = (replace(self, config=with_value(self.config, ENGINES, n)).phases() for n in (1, found.per_gpu))
        if any(alone.fits_device() and not each.fits_device() for alone, each in zip(one, several, strict=True)):
            return EngineCount(1, "asleep, several would keep memory that other phases need")
        return found

    @property
    def streaming(self) -> list[tuple[ModelRole, ModelMemory]]:
        return [(role, self.run.models[name]) for name, role in self.roles.items() if self.run.models[name].streams]

    def decided(self, length: int | None = None, is_least: bool = False) -> "MemoryForecast":
        """Return the forecast with values in place of `auto`: engines, small models that stay gathered, and the optimizer's state.

        `optimizer_state` gets what phases leave free on the device. Without an accelerator that is `device`; for a model or device of unknown size it is `host`. The actor is served first.
        """
        if self.config.actor_rollout_ref.rollout.engines_per_gpu == "auto":
            chosen = replace(self, config=with_value(self.config, ENGINES, self.engines.per_gpu))
            return chosen.decided(length, is_least)
        if self._stay_gathered:
            return self._with(self._stay_gathered).decided(length, is_least)
        keys = {role.name: f"{role.fsdp_key}.optimizer_state" for role in roles.trained_roles(self.config)}
        keys = {name: key for name, key in keys.items() if value_at(self.config, key) == "auto"}
        if not keys:
            return self

        def phases(values: dict[str, Any]) -> tuple[MemoryForecast, list[Phase]]:
            forecast = self._with(values)
            return forecast, [forecast.phase(name, length, is_least) for name in forecast.names]

        whole, of_whole = phases(dict.fromkeys(keys.values(), "device"))
        moving, of_moving = phases(dict.fromkeys(keys.values(), "host"))
        is_known = not self.unknown and self.memory_bytes is not None
        if not self.on_device or (is_known and all(phase.fits_device() for phase in of_whole)):
            return whole
        if not is_known:
            return moving
        free = int(max(0.0, min((phase.limit or 0.0) - phase.peak for phase in of_moving)))
        split = {}
        for name, key in keys.items():
            split[key] = min(free, int(self.run.models[name].update.optimizer))
            free -= split[key]
        return phases(split)[0]

    @cached_property
    def _stay_gathered(self) -> dict[str, Any]:
        """The models with `reshard_after_forward=auto` that are small enough for each process to keep them whole during a phase."""
        found, room = dict[str, Any](), WHOLE_SHARE * (self.memory_bytes or 0.0)
        for name, role in self.roles.items():
            fsdp, own = role.fsdp, self.run.models[name]
            shares_all = role.strategy == "fsdp2" and own.shards == processes(self.config) > 1
            chosen = fsdp.reshard_after_forward != "auto" or fsdp.forward_prefetch or fsdp.offload_policy
            if chosen or own.streams or not shares_all:
                continue
            if replace(own, is_resharded=False, stays_whole=True).update.gathered <= room:
                found[f"{role.fsdp_key}.reshard_after_forward"] = "never"
        return found if found and all(phase.fits_device() for phase in self._with(found).phases()) else {}

    def _with(self, values: Mapping[str, Any]) -> "MemoryForecast":
        return replace(self, config=reduce(lambda config, item: with_value(config, *item), values.items(), self.config))

    def split_states(self) -> list[tuple[str, float, float]]:
        """Return the roles whose optimizer state is not all on the device, with the bytes that stay there and the others."""
        models = self.run.models.items()
        return [(name, own.staying_state, own.moving_state) for name, own in models if own.moving_state]

    @property
    def names(self) -> list[str]:
        found = [name for name in OF_ROLE if self._role_of(name) in self.roles]
        of_some = {
            "old_log_prob": roles.log_prob_pass(self.config).prompts > 0,
            "ref": roles.has_reference(self.config),
        }
        return [name for name in found if of_some.get(name, True)]

    def _role_of(self, phase: str) -> str:
        return "actor" if phase == "ref" and not roles.has_reference_model(self.config) else OF_ROLE[phase]

    def phases(self, is_least: bool = False) -> list[Phase]:
        return [self.phase(name, is_least=is_least) for name in self.names]

    def phase(self, name: str, length: int | None = None, is_least: bool = False) -> Phase:
        """Return the forecast of one phase for the longest sequences, by default of the configured length [tokens].

        With `is_least` it counts only memory that is certain: one sample of this length if only the number of packed samples is
        limited, or if transformers decodes several at once.
        """
        if (decided := self.decided(length, is_least)) is not self:
            return decided.phase(name, length, is_least)
        role, longest = self.roles[self._role_of(name)], self.length if length is None else length
        own, policy, data = self.run.models[role.name], self.config.actor_rollout_ref, self.config.data
        if name == "rollout":
            rows = -(-data.train_batch_size * policy.rollout.n // roles.sampling_processes(self.config))
            return self.run.rollout(longest, 1 if is_least else min(policy.rollout.max_num_seqs, rows))
        if name == "sync":
            return self.run.sync(own)
        if name.startswith("update_"):
            load = self._load(role, role.micro, role.mini_batch_prompts, longest, is_least)
            return self.run.update(name, own, load)
        of_phase: dict[str, RolloutConfig | RefConfig] = {"old_log_prob": policy.rollout, "ref": policy.ref}
        micro = roles.log_prob_size(of_phase[name], policy.actor) if name in of_phase else role.micro
        return self.run.forward(name, own, self._load(role, micro, data.train_batch_size, longest, is_least))

    def longest(self, name: str) -> int | None:
        """Return the longest sequences, to 64 tokens, with which a phase fits under these settings; None if any fit."""
        lengths = range(LENGTH_STEP, LONGEST + 1, LENGTH_STEP)
        fitting = bisect_left(lengths, True, key=lambda length: not self.phase(name, length).fits())
        return None if fitting == len(lengths) else fitting * LENGTH_STEP

    def oversized(self, is_least: bool = False, margin: float = 1.0) -> list[Phase]:
        return [phase for phase in self.phases(is_least) if not phase.fits(margin)]

    def _model(self, role: ModelRole, decoder: Decoder) -> ModelMemory:
        fsdp, model, config = role.fsdp, role.model, self.config
        stored, reduced = BYTES[fsdp.model_dtype], BYTES[fsdp.mixed_precision.reduce_dtype]
        precision, options = fsdp.mixed_precision.param_dtype, model.activation_offload
        samples = role.mini_batch_prompts * config.actor_rollout_ref.rollout.n * role.sequence_parallel_size
        rows = samples // processes(config) * most_rows_of_a_sample(config)
        takes_one = role.micro.rows is not None and role.micro.rows >= rows  # nothing is summed over micro-batches
        of_trained = max(stored, ADAPTER_BYTES) if role.trained and model.lora_rank else stored
        room = NO_LIMIT if options.max_host_bytes is None else options.max_host_bytes
        spills = self.on_device and options.max_host_bytes is not None and options.directory is not None
        return ModelMemory(
            decoder,
            shards=fsdp.fsdp_size if fsdp.fsdp_size > 0 else processes(config),
            stored=stored,
            element=BYTES[precision] if precision != "auto" else 2 if self.on_device else stored,
            summed_in=reduced,
            is_trained=role.trained,
            has_device=self.on_device,
            gradient_bytes=of_trained if takes_one else max(of_trained, reduced),
            optimizer_bytes=role.optimizer_bytes,
            adapter_rank=model.lora_rank if role.trained else 0,
            is_resharded=fsdp.reshards(processes(config)),
            stays_whole=fsdp.reshard_after_forward == "never",
            is_quantized=role.trained and model.quantization is not None,
            weights_rest_on_host=self.on_device and fsdp.param_offload,
            steps_on_host=self.on_device and fsdp.offload_policy,
            device_state_bytes=fsdp.device_state_bytes,
            streams=self.on_device and model.layer_offload and roles.has_frozen_layers(role),
            from_disk=bool(model.layer_offload_directory),
            sharing=config.trainer.n_gpus_per_node,
            mode=_mode(model),
            tile=None if model.tiled_mlp == 0 else 0 if model.tiled_mlp == "auto" else int(model.tiled_mlp),
            shared_by=role.sequence_parallel_size,
            # Without an accelerator activations are in host memory already.
            host_room=room if self.on_device and options.tier != "disk" else 0,
            has_disk=options.tier == "disk" or spills,
        )

    def _sampler(self, decoder: Decoder | None) -> SamplerMemory:
        """Return the sampler's memory; weights of an unknown actor count as 0."""
        rollout, model = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model
        weights = cache = 0.0
        if decoder is not None:
            ranks = 1 if rollout.name == "hf" else rollout.tensor_model_parallel_size
            element = (2 if self.on_device else 4) if rollout.dtype == "auto" else BYTES[rollout.dtype]
            adapters = decoder.adapters(model.lora_rank) if model.sends_adapters else 0
            weights = (decoder.parameters + adapters) * element / ranks * self.engines.per_gpu
            cache = 2 * len(decoder.windows) * max(1.0, decoder.kv_heads / ranks) * decoder.head_width * element
        share, is_freed = rollout.gpu_memory_utilization, rollout.free_cache_engine
        own = self.engines.per_gpu * ENGINE_BYTES if self.engines.per_gpu > 1 else 0
        return SamplerMemory(weights, cache, rollout.name == "vllm", share, is_freed, model.sends_adapters, own)

    def _load(self, role: ModelRole, micro: MicroSize, prompts: int, length: int, is_least: bool) -> Load:
        """Return the largest micro-batch of a role for sequences of `length` tokens, in a batch of `prompts`.

        With `is_least` it counts one sample if samples are packed and only their number is limited.
        """
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        samples = prompts * rollout.n * (1 if is_least else most_rows_of_a_sample(self.config))
        share = -(-samples * role.sequence_parallel_size // processes(self.config))
        rows = share if micro.rows is None else min(share, micro.rows)
        if is_least and micro.rows is not None and role.model.use_remove_padding and role.name != "reward":
            rows = 1
        unique = _unique_tokens(role.model, rows, rollout.n, length, data)
        tokens = -(-unique // role.sequence_parallel_size)
        if micro.tokens is not None:
            tokens = max(-(-length // role.sequence_parallel_size), min(tokens, micro.tokens))
        if role.name not in ("actor", "ref"):
            return Load(tokens, 0)
        responses = rows * length * data.max_response_length
        return Load(tokens, -(-tokens * responses // (unique * (data.max_prompt_length + data.max_response_length))))


def most_rows_of_a_sample(config: PPOConfig) -> int:
    """Return the most rows of a conversation, which may fork before each turn but the first."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not roles.has_environment(config) or turns.on_rewritten_history != "fork":
        return 1
    return turns.max_assistant_turns or MANY_TURNS


def _unique_tokens(model: ModelConfig, rows: int, samples: int, length: int, data: DataConfig) -> int:
    """Return the tokens of rows of one length, in which prompts count once if they are shared."""
    prompt = length * data.max_prompt_length // (data.max_prompt_length + data.max_response_length)
    # Where samples do not fill whole groups, one more may be parted.
    prompts = min(rows, -(-rows // samples) + (rows > samples and rows % samples > 0))
    saved = (rows - prompts) * prompt
    return rows * length - (saved if saved > model.least_gain * rows * length else 0)


def _mode(model: ModelConfig) -> str:
    """Return the planner's name for the activation mode; `auto` counts as its mode with the least memory."""
    recomputes, save = model.enable_gradient_checkpointing, model.activation_offload.save
    if not model.enable_activation_offload:
        return "checkpointing" if recomputes else "plain"
    save = save or DEFAULT_SAVE[recomputes]
    return save if save in ("attention", "all") else "boundary"
