"""Compute each role's memory on its device and on the host from its model's shape."""

from typing import NamedTuple

from rlx.config.forecast.decoders import Known
from rlx.config.machine import Machine, on_accelerator, processes
from rlx.config.schema import DataConfig, ModelConfig, PPOConfig
from rlx.config.schema.roles import MicroSize, ModelRole, has_environment, has_frozen_layers, sharded_roles
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.memory import ADAPTER_BYTES, NF4_BYTES, StateBytes, state_bytes

CPU_CACHE_BYTES = 1 << 30  # vLLM's on a CPU
PINNED_ROUNDING = (
    2  # at most: torch rounds each page-locked block up to a power of two; Qwen2.5-14B's 29.5 GB took 54.1
)
MANY_TURNS = 1024  # of a conversation without a limit: the size of micro-batches decides
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class RoleMemory(NamedTuple):
    """One process's share of a role under FSDP [bytes]."""

    role: ModelRole
    decoder: Decoder  # its model's shape
    stored: int  # of a stored weight
    element: int  # of an element of activations
    update: StateBytes  # states of the model in an update, on device or host
    forward: StateBytes  # the same in a pass without backward
    has_device: bool  # whether the role runs on an accelerator, so that states can be offloaded
    streamed: float = 0.0  # frozen weights of layers that wait on the host, or on its disk
    sharing: int = 1  # processes of a machine, which share them
    buffers: float = 0.0  # those of two layers, on the device while the role works; part of the states' weights

    @property
    def is_on_host(self) -> bool:
        """Whether weights, gradients and the optimizer's step are on the host."""
        return self.has_device and self.role.fsdp.offload_policy

    @property
    def moving_state(self) -> float:
        """Bytes of the optimizer's state that are on the host, and on the device only during the step."""
        if not self.has_device or self.is_on_host:
            return 0.0
        return max(0.0, self.update.optimizer - self.role.fsdp.device_state_bytes)

    @property
    def staying_state(self) -> float:
        """Bytes of the optimizer's state that are always on the device."""
        return 0.0 if self.is_on_host else self.update.optimizer - self.moving_state

    @property
    def device_at_rest(self) -> float:
        """Bytes on the device while another role works."""
        if self.is_on_host:
            return 0.0
        weights = 0.0 if self.has_device and self.role.fsdp.param_offload else self._weights_at_rest
        return weights + self.staying_state

    @property
    def _weights_at_rest(self) -> float:
        return self.update.weights - self.buffers

    @property
    def host_at_rest(self) -> float:
        """Bytes on the host while another role works."""
        return self._waiting + self._weights_at_rest + self.update.optimizer - self.device_at_rest

    @property
    def host_at_work(self) -> float:
        """Bytes on the host while this role works, activations aside."""
        if self.is_on_host:
            return self._waiting + sum(self.update[:3]) - self.buffers
        return self._waiting + self.moving_state

    @property
    def _waiting(self) -> float:
        return 0.0 if self.role.model.layer_offload_directory else self.streamed / self.sharing

    def on_device(self, states: StateBytes) -> StateBytes:
        """Return the part of `states` on the device while this role works; the planner itself omits an optimizer state on the host."""
        return states._replace(weights=self.buffers, gradients=0.0, optimizer=0.0) if self.is_on_host else states


def role_memories(config: PPOConfig, machine: Machine, decoders: dict[str, Known]) -> dict[str, RoleMemory]:
    """Return the memory of each role whose model is known, by name."""
    found = {role.name: (role, decoders[role.name]) for role in sharded_roles(config)}
    return {n: _role_memory(role, d, config, machine) for n, (role, d) in found.items() if not isinstance(d, str)}


def _role_memory(role: ModelRole, decoder: Decoder, config: PPOConfig, machine: Machine) -> RoleMemory:
    fsdp, on_device = role.fsdp, on_accelerator(config, machine)
    stored = BYTES[fsdp.model_dtype]
    precision = fsdp.mixed_precision.param_dtype
    element = (2 if on_device else stored) if precision == "auto" else BYTES[precision]
    shards = fsdp.fsdp_size if fsdp.fsdp_size > 0 else processes(config)
    reduced = BYTES[fsdp.mixed_precision.reduce_dtype]
    rows = (
        role.mini_batch_prompts * config.actor_rollout_ref.rollout.n * role.sequence_parallel_size // processes(config)
    )
    rows *= most_rows_of_a_sample(config)
    takes_one = role.micro.rows is not None and role.micro.rows >= rows  # nothing is summed over micro-batches
    rank = role.model.lora_rank if role.trained else 0
    of_trained = max(stored, ADAPTER_BYTES) if rank else stored

    def states(is_trained: bool) -> StateBytes:
        return state_bytes(
            decoder,
            shards,
            stored,
            element,
            is_trained=is_trained,
            adapter_rank=rank,
            summed_in=reduced,
            is_resharded=fsdp.reshards(processes(config)),
            gradient_bytes=of_trained if takes_one else max(of_trained, reduced),
            optimizer_bytes=role.optimizer_bytes,
            is_quantized=role.trained and role.model.quantization is not None,
        )

    update, forward = states(role.trained), states(False)
    forward = forward._replace(optimizer=update.optimizer)
    memory = RoleMemory(role, decoder, stored, element, update, forward, on_device)
    streams = on_device and role.model.layer_offload and has_frozen_layers(role)
    if not streams:
        return memory
    return _with_streamed_layers(memory, shards, fsdp.reshards(processes(config)), config.trainer.n_gpus_per_node)


def _with_streamed_layers(memory: RoleMemory, shards: int, is_resharded: bool, sharing: int) -> RoleMemory:
    """Return a role's memory with the weights of its layers on the host, quantised or in the type of computation. FSDP gathers none of them.

    Norms and biases, which stay on the device, are counted as streamed: they are less than 0.1 %.
    """
    layers = sorted(map(memory.decoder.layer_parameters, range(len(memory.decoder.windows))))
    is_quantized = memory.role.trained and memory.role.model.quantization is not None
    on_host, stored = (NF4_BYTES, NF4_BYTES) if is_quantized else (memory.element, memory.stored)
    is_gathered = shards > 1 or stored != on_host
    buffers = sum(layers[-2:]) * on_host
    at_once = layers[-1] * (2 if is_resharded else len(layers))
    gathered = at_once * on_host * is_gathered

    def without_layers(states: StateBytes) -> StateBytes:
        weights = states.weights - sum(layers) * stored / shards + buffers
        return states._replace(weights=weights, gathered=max(0.0, states.gathered - gathered))

    return memory._replace(
        update=without_layers(memory.update),
        forward=without_layers(memory.forward),
        streamed=float(sum(layers) * on_host),
        buffers=float(buffers),
        sharing=sharing,
    )


class SamplerMemory(NamedTuple):
    """One process's share of the sampler [bytes]."""

    weights: float
    token_cache: float  # keys and values of one token
    at_rest: float  # while another role works
    host_at_rest: float = 0.0  # on the host meanwhile, although it works on a device


def sampler_memory(
    config: PPOConfig, actor: RoleMemory | None, on_device: bool, memory_bytes: float | None
) -> SamplerMemory:
    """Return the sampler's memory on a device of `memory_bytes`; weights of an unknown actor count as 0."""
    rollout, model, weights, token_cache = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, 0.0, 0.0
    if actor is not None:
        ranks = 1 if rollout.name == "hf" else rollout.tensor_model_parallel_size
        element = (2 if on_device else 4) if rollout.dtype == "auto" else BYTES[rollout.dtype]
        decoder = actor.decoder
        adapters = decoder.adapters(model.lora_rank) if model.sends_adapters else 0
        weights = (decoder.parameters + adapters) * element / ranks
        heads = max(1.0, decoder.kv_heads / ranks)
        token_cache = 2 * len(decoder.windows) * heads * decoder.head_width * element
    if rollout.name == "hf":
        return SamplerMemory(weights, token_cache, at_rest=weights)
    if not on_device:
        return SamplerMemory(weights, token_cache, at_rest=weights + CPU_CACHE_BYTES)
    share = rollout.gpu_memory_utilization * (memory_bytes or 0.0)
    if not rollout.free_cache_engine:
        return SamplerMemory(weights, token_cache, at_rest=share)
    # A sampler that takes adapters alone keeps its base, in host memory: a block for each weight.
    return SamplerMemory(
        weights, token_cache, at_rest=0.0, host_at_rest=PINNED_ROUNDING * weights if model.sends_adapters else 0.0
    )


def most_rows_of_a_sample(config: PPOConfig) -> int:
    """Return the most rows of a conversation, which may fork before each turn but the first."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not has_environment(config) or turns.on_rewritten_history != "fork":
        return 1
    return turns.max_assistant_turns or MANY_TURNS


class Load(NamedTuple):
    """The largest micro-batch on one process."""

    tokens: int
    logits: int  # tokens whose log-probs are computed


def load(memory: RoleMemory, config: PPOConfig, micro: MicroSize, prompts: int, length: int, is_least: bool) -> Load:
    """Return the largest micro-batch of a role for sequences of `length` tokens, in a batch of `prompts`.

    With `is_least` it counts one sample if samples are packed and only their number is limited.
    """
    role, rollout, data = memory.role, config.actor_rollout_ref.rollout, config.data
    samples = prompts * rollout.n * (1 if is_least else most_rows_of_a_sample(config))
    share = -(-samples * role.sequence_parallel_size // processes(config))
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


def _unique_tokens(model: ModelConfig, rows: int, samples: int, length: int, data: DataConfig) -> int:
    """Return the tokens of rows of one length, in which prompts count once if they are shared."""
    prompt = length * data.max_prompt_length // (data.max_prompt_length + data.max_response_length)
    # Where samples do not fill whole groups, one more may be parted.
    prompts = min(rows, -(-rows // samples) + (rows > samples and rows % samples > 0))
    saved = (rows - prompts) * prompt
    return rows * length - (saved if saved > model.least_gain * rows * length else 0)
