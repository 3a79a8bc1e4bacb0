"""The figures of a decoder that determine time and memory, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ARCHITECTURES = (
    *("llama", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3"),
    *("granite", "smollm3", "seed_oss", "glm", "glm4_moe", "ernie4_5", "cwm", "olmo2", "olmo3"),
)
"""Architectures, by transformers' names, that the formulas describe."""


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder; widths in elements."""

    width: int  # of the hidden states
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_width: int
    mlp_width: int  # of a dense MLP
    vocabulary: int
    tied: bool  # head and embedding share their weights
    qk_norm: bool  # q and k go through norms
    qkv_bias: bool  # q, k and v have biases
    experts: int
    active_experts: int  # number of experts that process a token
    expert_width: int
    shared_width: int  # of the shared expert, which processes all tokens; 0: none
    windows: tuple[int | None, ...]  # for each layer the number of tokens that a query attends to, None for all
    sparse: tuple[bool, ...]  # for each layer whether it has experts

    def layer_parameters(self, layer: int) -> int:
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        attention += self.head_width * ((self.heads + 2 * self.kv_heads) * self.qkv_bias + 2 * self.qk_norm)
        dense = self.shared_width if self.sparse[layer] else self.mlp_width
        routed = self.experts * (3 * self.expert_width + 1) if self.sparse[layer] else 0
        return attention + self.width * (3 * dense + routed + 2)

    @property
    def root_parameters(self) -> int:
        return self.width * (self.vocabulary * (1 if self.tied else 2) + 1)

    @property
    def recorded_bytes(self) -> int:
        """Bytes of the numbers of a token's experts in all layers, see `rlx.models.experts.small_integers`."""
        return len(self.sparse) * self.active_experts * (1 if self.experts <= 256 else 2)

    @property
    def without_head(self) -> Decoder:
        return replace(self, tied=True)

    def adapters(self, rank: int) -> int:
        """Return the number of weights of LoRA adapters on all linear maps except experts, whose weights are one tensor."""
        q, kv, d = self.heads * self.head_width, self.kv_heads * self.head_width, self.width
        dense = [self.shared_width if is_sparse else self.mlp_width for is_sparse in self.sparse]
        return rank * sum(2 * (d + q) + 2 * (d + kv) + 3 * (d + width) * bool(width) for width in dense)

    @property
    def parameters(self) -> int:
        return self.root_parameters + sum(map(self.layer_parameters, range(len(self.windows))))


def read_decoder(config: Any, layers: int | None = None) -> Decoder:
    """Read the decoder from a configuration of transformers; ValueError if the formulas do not cover the architecture.

    With another number of `layers` than the configuration's their kinds repeat in order.
    """

    def get(name: str, default: Any = None) -> Any:
        found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if found is None else found

    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    kind, types = str(get("model_type", "")), get("layer_types", [])
    faults = [f"no {name}" for name in needed if not isinstance(get(name), int) or get(name) < 1]
    faults += sorted(set(types) - {"full_attention", "sliding_attention"})
    faults += ["latent attention"] if get("kv_lora_rank") else []
    faults += ["layers of another kind"] if kind and kind not in ARCHITECTURES else []
    if faults:
        raise ValueError(
            f"the configuration of a {kind or 'model'} has {', '.join(faults)}, which the formulas do not cover: they are for "
            "decoders like Llama, Qwen and Mistral with attention, full or sliding, and gated MLPs or experts"
        )
    count, window = get("num_hidden_layers"), get("sliding_window") if get("use_sliding_window", True) else None
    if not types:
        types = ["sliding_attention" if window else "full_attention"] * count
    experts = get("num_experts") or get("num_local_experts") or get("n_routed_experts") or 0
    every, dense = get("decoder_sparse_step", 1), set(get("mlp_only_layers", ()))
    sparse = [
        bool(experts) and i >= get("first_k_dense_replace", 0) and i not in dense and (i + 1) % every == 0
        for i in range(count)
    ]
    order = range(count) if layers is None else [i % count for i in range(layers)]
    expert_width = get("moe_intermediate_size", get("intermediate_size"))
    return Decoder(
        width=get("hidden_size"),
        heads=get("num_attention_heads"),
        kv_heads=get("num_key_value_heads", get("num_attention_heads")),
        head_width=get("head_dim", get("hidden_size") // get("num_attention_heads")),
        mlp_width=get("intermediate_size"),
        vocabulary=get("vocab_size"),
        tied=bool(get("tie_word_embeddings", False)),
        qk_norm=kind.startswith("qwen3"),
        qkv_bias=bool(get("attention_bias")) or kind.startswith("qwen2"),
        experts=experts,
        active_experts=get("num_experts_per_tok", 0),
        expert_width=expert_width,
        shared_width=get("shared_expert_intermediate_size", get("n_shared_experts", 0) * expert_width),
        windows=tuple(window if types[i] == "sliding_attention" else None for i in order),
        sparse=tuple(sparse[i] for i in order),
    )
