"""Keys of a model and of its activations: `actor_rollout_ref.model`, `critic.model`."""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.keys import Need, group, in_state, key, needs, while_is, without
from rlx.offload.runtime.options import LIMITS, OffloadOptions


def _option(name: str, doc: str, **limits: Any) -> Any:
    """A key with the default and the limits that the engine gives to its option."""
    return key(getattr(OffloadOptions, name), doc, **LIMITS.get(name, {}), **limits)


@dataclass(frozen=True)
class ActivationOffloadConfig:
    """Options of the activation engine (`rlx.offload.OffloadOptions`), read when `enable_activation_offload` is set."""

    save: str | None = _option(
        "save",
        "Activations to offload: docs/activation_offloading.md; null: boundary with gradient checkpointing, else all.",
    )
    tier: str = _option("tier", "Tier that takes them: host memory (cpu) or disk.")
    directory: str | None = _option("directory", "Folder of the disk tier, or beyond `max_host_bytes`.", is_path=True)
    prefetch_layers: int | None = _option("prefetch_layers", "Layers that backward fetches ahead; null: as fits.")
    max_inflight_bytes: int | None = _option(
        "max_inflight_bytes", "Bytes in flight until forward waits; null: as fits."
    )
    min_bytes: int = _option("min_bytes", "Smaller tensors stay on the device [bytes].")
    pin_memory: bool = _option("pin_memory", "Page-locked host memory, for copies that overlap compute.")
    use_streams: bool = _option("use_streams", "Copy on separate streams.")
    max_host_bytes: int | None = _option("max_host_bytes", "Limit of host memory per process [bytes]; null: none.")
    max_device_bytes: int | str = _option("max_device_bytes", "Most device bytes of `save=auto`; auto: what is free.")


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)
"""A folder with any of these has a tokenizer."""
MODEL_JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
"""Files of a model folder that hold a JSON object, if they are there."""

LARGEST_SEED = 2**32 - 1
"""The largest seed of numpy's generator, which vLLM seeds; torch accepts more."""


@dataclass(frozen=True)
class TinyModelConfig:
    """The transformer that `builtin:tiny` names: Qwen3 architecture over bytes."""

    hidden_size: int = key(128, "Width.", minimum=8)
    intermediate_size: int = key(384, "Width of the MLP.", minimum=8)
    num_hidden_layers: int = key(4, "Layers.", minimum=1)
    num_attention_heads: int = key(4, "Attention heads; each at least 32 wide, as vLLM asks.", minimum=1)
    num_key_value_heads: int = key(2, "Key/value heads.", minimum=1, divides="num_attention_heads")
    seed: int = key(0, "Seed of the first weights.", minimum=0, maximum=LARGEST_SEED)

    @property
    def head_dim(self) -> int:
        return max(32, self.hidden_size // self.num_attention_heads)


SHARED_PREFIX_GAIN = 0.03
"""With `use_shared_prefix=auto` sharing has to save more than this share of the tokens, to pay for its calls of attention."""


@dataclass(frozen=True)
class LoraConfig:
    """Kinds of adapters, and how they reach the sampler."""

    merge: bool = key(False, "Send the sampler merged weights instead of adapters alone.")
    use_dora: bool = key(False, "DoRA: learn the length of each row of the weights apart from its direction.")
    use_rslora: bool = key(False, "rsLoRA: scale by alpha / sqrt(rank) instead of alpha / rank.")


STREAMS = needs("layer offloading needs FSDP2", "role.strategy", "fsdp2")


def packed(what: str, **when: Any) -> tuple[Need, ...]:
    text = f"{what} are packed rows in rlx's own attention"
    return (
        needs(text, "role.model.use_remove_padding", True, **when),
        needs(text, "role.model.attn_implementation", "sdpa", **when),
    )


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = key(None, "Folder, hub name or `builtin:tiny`; null, critic only: the actor's.", is_path=True)
    trust_remote_code: bool = key(False, "Run code from the model folder.")
    override_config: dict[str, Any] = key({}, "Values to set in the model's config.json.")
    attn_implementation: str = key(
        "sdpa", "Attention kernel, as transformers names it.", package="flash-attn", package_for=("flash_attention_2",)
    )
    experts_implementation: str | None = key(
        None, "Kernel of experts, as transformers names it; null: grouped_mm where possible."
    )
    use_liger: bool = key(False, "Fused norms, MLPs and rotary embeddings, on GPUs.", package="liger-kernel")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in backward instead of keeping them.")
    enable_activation_offload: bool = key(False, "Move activations off the device until backward needs them.")
    activation_offload: ActivationOffloadConfig = group(
        ActivationOffloadConfig, "How.", without("enable_activation_offload")
    )
    layer_offload: bool = key(False, "Keep frozen weights of layers in host memory, fetched one layer ahead.", STREAMS)
    layer_offload_directory: str | None = key(None, "Local folder for them instead; null: host memory.", is_path=True)
    use_remove_padding: bool = key(True, "Pack a micro-batch's sequences into one row without padding.")
    use_shared_prefix: bool | str = key(
        "auto",
        "Compute a prompt once for all its responses; auto: where that saves more than 3 % of the tokens.",
        while_is("actor_rollout_ref.rollout.n", 1),
        *packed("shared prefixes", when=lambda shares: shares is True),
        words=("auto",),
    )
    tiled_mlp: int | str = key(0, "Tokens of a tile of MLPs and norms; 0: no tiles.", minimum=0, words=("auto",))
    lora_rank: int = key(0, "Rank of LoRA adapters; 0 trains every weight.", minimum=0, package="peft>=0.17")
    lora_alpha: int = key(16, "Scale of the adapters: alpha / rank.", without("lora_rank"), minimum=1)
    target_modules: str = key(
        "all-linear",
        "Modules with adapters: `all-linear`, or names of linear layers or experts.",
        without("lora_rank"),
        joined=True,
    )
    lora_adapter_path: str | None = key(
        None,
        "Folder of peft's adapters to start from; null: fresh ones.",
        needs("there are adapters to start from, but no rank", "lora_rank", expected=" as in adapter_config.json"),
        is_path=True,
    )
    quantization: str | None = key(
        None,
        "Hold the frozen weights of layers in 4.5 bits each (nf4); null: in model_dtype.",
        needs("weights that are trained cannot be quantised", "lora_rank", expected=" above 0"),
        needs("a quantised base needs FSDP2", "role.strategy", "fsdp2"),
        needs("DoRA reads the base's weights, which are quantised", "lora.use_dora", False),
        needs("quantised weights have no fp64 form", "role.fsdp.model_dtype", "fp32", "bf16"),
        needs("quantised weights have no fp64 form", "role.fsdp.mixed_precision.param_dtype", "auto", "fp32", "bf16"),
        words=("nf4",),
        package="bitsandbytes>=0.50",
    )
    lora: LoraConfig = group(LoraConfig, "Kinds of adapters, and how they reach the sampler.", without("lora_rank"))
    tiny: TinyModelConfig = group(TinyModelConfig, "Shape of `builtin:tiny`.", in_state("not tiny"))

    @property
    def sends_adapters(self) -> bool:
        """Whether the sampler keeps the base and takes adapters alone."""
        return self.lora_rank > 0 and not self.lora.merge

    @property
    def least_gain(self) -> float:
        """The share of their tokens that rows with a common beginning have to save for it to be computed once; 1.0: never."""
        if not (self.use_shared_prefix and self.use_remove_padding and self.attn_implementation == "sdpa"):
            return 1.0
        return SHARED_PREFIX_GAIN if self.use_shared_prefix == "auto" else 0.0
