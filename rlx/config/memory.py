"""An estimate of each role's memory, from the shape of the model alone.

n parameters (Llama-shaped decoder: V vocabulary, d width, L layers, h heads of width e, k key/value heads, f MLP width):
n = V d (embedding; once more for an untied head) + L (2 d h e + 2 d k e + 3 d f + 2 d) + d, plus biases and q/k norms
where the architecture has them; with experts the MLP counts once per expert. Per process, with g processes in a sharding
group and b bytes of model_dtype: parameters n b / g, gradients the same, AdamW twice the same (LoRA: of the adapters).
Activations of t tokens of a micro-batch in c bytes of the compute type: one layer holds
t c (4 d + 2 h e + 2 k e + 4 f) while its backward runs (inputs and outputs of two norms; q, attention output, k, v; gate,
up, activation, product; attention itself is fused and keeps no matrix of scores), the 4 f with tiled_mlp for one tile only;
of these f none are kept then. Kept for backward: t c d L with gradient checkpointing (each layer's input),
t c L (2 d + 2 h e + 2 k e) where activation offloading saves `attention` too (output projection; q, attention output, k, v),
else L times what one layer holds. The sampler keeps its own copy of the weights and 2 L k e values per token of its key/value cache. A chunk of logits, buffers of collectives and the allocator's slack
come on top. On the host wait, at most and not all at once: parameters and optimizer states that fsdp_config takes off the
device, and what activation offloading keeps for backward, up to `max_host_bytes`; what exceeds that stays on the device or
is on disk. Staging memory of the disk tier comes on top.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from rlx.config.machine import Machine, on_accelerator, processes
from rlx.config.roles import TINY, ModelRole, sharded_roles
from rlx.config.schema import ModelConfig, PPOConfig, TinyModelConfig

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
TINY_VOCABULARY = 262  # bytes, ByT5's three special tokens, one token per chat role
GIB = 2**30
HOST, DISK = "*", "+"
LEAST_TILE = 8192  # tokens, of rlx.offload.enable_tiling


class Shape(NamedTuple):
    """What of a decoder counts for memory; widths in elements. `experts` is 1 for a dense model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    experts: int = 1
    active_experts: int = 1
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def backbone(self) -> int:
        """Parameters without the head: embedding, layers, final norm."""
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.width * q + 2 * self.width * kv
        attention += (q + 2 * kv) * self.qkv_bias + 2 * self.head_width * self.qk_norm
        router = self.width * self.experts if self.experts > 1 else 0
        layer = attention + 3 * self.width * self.mlp_width * self.experts + router + 2 * self.width
        return self.vocabulary * self.width + self.layers * layer + self.width

    @property
    def language_model(self) -> int:
        """Parameters with the head over the vocabulary."""
        return self.backbone + (0 if self.tied else self.vocabulary * self.width)

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on all linear modules of the layers."""
        q, kv, d, f = self.heads * self.head_width, self.kv_heads * self.head_width, self.width, self.mlp_width
        return self.layers * rank * (2 * (d + q) + 2 * (d + kv) + 3 * (d + f) * self.experts)

    @property
    def attention_activations(self) -> int:
        """Elements per token that attention takes and gives: q, output, k, v."""
        return 2 * self.heads * self.head_width + 2 * self.kv_heads * self.head_width

    @property
    def mlp_activations(self) -> int:
        """Elements per token that the MLP makes."""
        return 4 * self.mlp_width * self.active_experts

    def layer_activations(self, model: ModelConfig, tokens: int) -> int:
        """Elements that one layer holds while its backward runs over so many tokens."""
        at_once = tokens
        if model.tiled_mlp and self.experts == 1:
            chosen = max(LEAST_TILE, tokens * self.width // (8 * self.mlp_width))
            at_once = min(tokens, chosen if model.tiled_mlp == "auto" else int(model.tiled_mlp))
        return tokens * (4 * self.width + self.attention_activations) + at_once * self.mlp_activations

    def kept_activations(self, model: ModelConfig) -> int:
        """Elements per token that one layer keeps from forward to backward."""
        if not model.enable_gradient_checkpointing:
            mlp = 0 if model.tiled_mlp and self.experts == 1 else self.mlp_activations
            return 4 * self.width + self.attention_activations + mlp
        if model.enable_activation_offload and model.activation_offload.save == "attention":
            return 2 * self.width + self.attention_activations
        return self.width


class Memory(NamedTuple):
    """Bytes per process; None where the shape of the model or of the micro-batch is not known.

    `on_host` is what of the others waits in host memory while the device computes something else, at most.
    """

    role: str
    parameters: float | None
    gradients: float | None = 0.0
    optimizer: float | None = 0.0
    layer_activations: float | None = 0.0
    kept_for_backward: float | None = 0.0
    cache: float | None = 0.0
    on_host: float | None = 0.0


def tiny_shape(tiny: TinyModelConfig) -> Shape:
    """The shape of `builtin:tiny`."""
    return Shape(
        vocabulary=TINY_VOCABULARY,
        width=tiny.hidden_size,
        layers=tiny.num_hidden_layers,
        heads=tiny.num_attention_heads,
        kv_heads=tiny.num_key_value_heads,
        head_width=tiny.head_dim,
        mlp_width=tiny.intermediate_size,
        qk_norm=True,
    )


def shape_of(model: ModelConfig) -> Shape | None:
    """The shape of a model; None when its config.json is not on this machine or describes no such decoder."""
    if model.path == TINY:
        return tiny_shape(model.tiny)
    file = Path(model.path or "").expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        whole: dict[str, Any] = json.loads(file.read_text())
        return _shape_from({**whole, **whole.get("text_config", {}), **model.override_config})
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # loading the model will say what is wrong with it; here only the estimate is missing


def _shape_from(config: dict[str, Any]) -> Shape:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    kind = str(config.get("model_type", ""))
    return Shape(
        vocabulary=config["vocab_size"],
        width=width,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or width // heads,
        mlp_width=(config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"],
        experts=experts,
        active_experts=config.get("num_experts_per_tok") or 1,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias")) or kind.startswith("qwen2"),
        qk_norm=kind.startswith("qwen3"),
    )


def estimate(config: PPOConfig, machine: Machine) -> list[Memory]:
    """Each role's memory per process."""
    policy = shape_of(config.actor_rollout_ref.model)
    found = []
    for role in sharded_roles(config):
        # The built-in critic has the policy's shape, whatever its own subtree says.
        shape = policy if role.model.path == TINY else shape_of(role.model)
        found.append(_of_role(role, shape, config, machine))
    return [*found, _of_rollout(policy, config, machine)]


def _of_role(role: ModelRole, shape: Shape | None, config: PPOConfig, machine: Machine) -> Memory:
    if shape is None:
        return Memory(role.name, *(None,) * 5, on_host=None)
    stored = BYTES[role.fsdp.model_dtype]
    share = stored / (role.fsdp.fsdp_size if role.fsdp.fsdp_size > 0 else processes(config))
    count = shape.backbone + shape.width if role.name in ("critic", "reward") else shape.language_model
    adapters = shape.adapters(role.model.lora_rank) if role.trained else 0
    trained = (adapters or count) if role.trained else 0
    precision = role.fsdp.mixed_precision.param_dtype
    compute = BYTES[precision] if precision != "auto" else (2 if on_accelerator(config, machine) else stored)
    tokens = micro_batch_tokens(role, config)
    held = compute * shape.layer_activations(role.model, tokens) if tokens is not None else None
    kept: float | None = 0.0
    if role.trained:
        per_token = shape.kept_activations(role.model) * shape.layers
        kept = tokens * compute * per_token if tokens is not None else None
    memory = Memory(role.name, (count + adapters) * share, trained * share, 2 * trained * share, held, kept)
    return memory._replace(on_host=_on_host(memory, role)) if on_accelerator(config, machine) else memory


def _on_host(memory: Memory, role: ModelRole) -> float | None:
    places, options = _places(role), role.model.activation_offload
    waiting = [getattr(memory, name) for name, mark in places.items() if mark == HOST and name != "kept_for_backward"]
    if places.get("kept_for_backward") == HOST:
        cap, kept = options.max_host_bytes, memory.kept_for_backward
        waiting.append(kept if cap is None or kept is None else min(cap, kept))
    return None if None in waiting else sum(waiting)


def _of_rollout(shape: Shape | None, config: PPOConfig, machine: Machine) -> Memory:
    if shape is None:
        return Memory("rollout", None, cache=None)
    rollout = config.actor_rollout_ref.rollout
    width = BYTES[rollout.dtype] if rollout.dtype != "auto" else (2 if on_accelerator(config, machine) else 4)
    rows = min(rollout.max_num_seqs, -(-config.data.train_batch_size * rollout.n // processes(config)))
    tokens = rows * (config.data.max_prompt_length + config.data.max_response_length)
    cache = tokens * 2 * shape.layers * shape.kv_heads * shape.head_width * width
    return Memory("rollout", shape.language_model * width / rollout.tensor_model_parallel_size, cache=cache)


def micro_batch_tokens(role: ModelRole, config: PPOConfig) -> int | None:
    """Tokens of one forward on one process, at most; None when nothing says so."""
    micro = role.micro
    if micro.rows is None:
        return micro.tokens
    rows = -(-role.mini_batch_prompts * config.actor_rollout_ref.rollout.n * role.together // processes(config))
    longest = config.data.max_prompt_length + config.data.max_response_length
    return -(-min(micro.rows, rows) * longest // role.together)


def table(config: PPOConfig, machine: Machine) -> str:
    """The estimate as text."""
    columns = ("parameters", "gradients", "optimizer", "one layer", "for backward", "kv cache", "on host")
    lines = [f"{'GiB':8}" + "".join(f"{name:>14}" for name in columns)]
    roles = {role.name: role for role in sharded_roles(config)} if on_accelerator(config, machine) else {}
    for memory in estimate(config, machine):
        marks = _places(roles[memory.role]) if memory.role in roles else {}
        cells = (_cell(value, marks.get(name, " ")) for name, value in zip(Memory._fields[1:], memory[1:], strict=True))
        lines.append(f"{memory.role:8}" + "".join(f"{cell:>14}" for cell in cells))
    lines.append(
        f"? = not known before the model is loaded; {HOST} = in host memory, {DISK} = on disk, while the device computes "
        "something else"
    )
    return "\n".join(lines)


def _places(role: ModelRole) -> dict[str, str]:
    """The columns of a role that wait off the device, and where."""
    fsdp, model = role.fsdp, role.model
    places = {}
    if fsdp.param_offload or fsdp.offload_policy:
        places["parameters"] = HOST
    if fsdp.optimizer_offload or fsdp.offload_policy:
        places["optimizer"] = HOST
    if role.trained and model.enable_activation_offload:
        places["kept_for_backward"] = DISK if model.activation_offload.tier == "disk" else HOST
    return places


def _cell(value: float | None, mark: str) -> str:
    text = "?" if value is None else "-" if value == 0 else f"{value / GIB:.3f}"
    return text + (mark if value else " ")
