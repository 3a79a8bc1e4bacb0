"""Make a tiny model of any causal language model type of transformers, with large random weights."""

import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlx.models.loading import RANDOMNESS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LAYERS = 4
TOKENS = 128
SCALE = 2.0  # of weights times the root of their width
# Windows and chunks are shorter than the sweep's sequences, so that they matter.
_SIZES = {
    # (names of transformers' configurations, value)
    "vocab_size vocab_size_per_layer_input audio_vocab_size n_token": TOKENS,
    "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size "
    "output_embedding_size dim_model hidden_size_global attention_hidden_size lru_width": 128,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers num_decoder_layers "
    "num_blocks": LAYERS,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads": 4,
    "index_n_heads": 16,  # of scores above 0; tokens without any would tie for the last places
    "num_key_value_heads num_kv_heads swa_num_key_value_heads": 2,
    "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_inner ffn_hidden_size dim_ff dff "
    "dense_intermediate_size intermediate_size_mlp shared_intermediate_size feed_forward_size": 96,
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size": 64,
    "head_dim d_head swa_head_dim index_head_dim global_head_dim dim_head attention_head_size kv_channels "
    "linear_key_head_dim linear_value_head_dim linear_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim": 32,
    "q_lora_rank kv_lora_rank o_lora_rank hc_lowrank": 32,
    "laurel_rank adapter_rank gated_norm_rank": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads linear_num_heads": 4,
    "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num": 4,
    "num_experts_per_tok num_experts_per_token moe_topk moe_k": 2,
    "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group": 1,
    "first_k_dense_replace num_dense_layers moe_layer_start_index": 1,
    "max_position_embeddings n_positions n_ctx max_seq_len context_length original_max_position_embeddings "
    "model_max_length": 64,
    "sliding_window attention_chunk_size window_size local_attention attention_window_size sliding_window_size": 5,
    "index_topk": 6,
    "state_size mamba_d_state ssm_state_size mamba_dt_rank time_step_rank": 8,
    "mamba_n_heads n_mamba_heads mamba_num_heads": 8,
    "mamba_d_head mamba_headdim mamba_head_dim": 32,
    "mamba_d_ssm": 256,
    "mamba_chunk_size chunk_size": 8,
    "n_groups mamba_n_groups": 2,
    "hidden_size_per_layer_input router_hidden_size d_rel ple_embed_dim": 16,
    "num_kv_shared_layers": 2,
    "attn_logit_softcapping final_logit_softcapping logits_soft_cap output_logit_soft_cap": 5.0,
}
SIZES = {name: value for names, value in _SIZES.items() for name in names.split()}

OFTEN_NULL = {"head_dim", "num_key_value_heads"}
OFTEN_NULL |= {f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
SPECIAL_TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}

# The features that a type's default configuration leaves out, and the sizes that must fit each other.
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}


def _rope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **changes}}


EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 16},
    "cohere_compass_text": _WINDOWS | {"rope_parameters": dict.fromkeys(_WINDOWS["layer_types"], _SECTIONS)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4, "attn_pdrop": 0.1},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_routed_experts": 4, "first_k_dense_replace": 1}
    | _WINDOWS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "laguna": _WINDOWS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"moe_layers": [1, 3]},
    "mamba2": {"num_heads": 8},
    "mellum": _WINDOWS,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe": {"use_sliding_window": True, "mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds_dim": [64, 64], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Changes by type."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert: no decoder": ("bert", {"is_decoder": False}),
    "llama: llama3 rope and ties": (
        "llama",
        {"tie_word_embeddings": True}
        | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "qwen2: tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3: tied": ("qwen3", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3: yarn rope": ("qwen3", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "phi3: longrope": (
        "phi3",
        {"original_max_position_embeddings": 32}
        | _rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0] * 12,
            long_factor=[2.0] * 12,
            original_max_position_embeddings=32,
        ),
    ),
    "deepseek_v3: no q_lora": ("deepseek_v3", {"q_lora_rank": None}),
    "doge: chosen keys": ("doge", {"keep_window_size": 5}),
    "mamba2: one group": ("mamba2", {"n_groups": 1}),
    "mistral: no window": ("mistral", {"sliding_window": None}),
}
"""Rows of the table besides the types themselves: the type, and changes of its configuration."""


def tiny_config(kind: type["PreTrainedConfig"], **changes: Any) -> "PreTrainedConfig":
    """Return a configuration of this class with few, narrow layers; each kind of layer of the default one is there."""
    default = kind()
    values = default.to_dict()
    given: dict[str, Any] = {}
    for field in fields(kind):
        name, value = field.name, values.get(field.name)
        size = SIZES.get(name, SIZES.get(kind.attribute_map.get(name, name)))
        optional = "None" in str(field.type)
        if name in SPECIAL_TOKENS:
            given[name] = 0 if name == "pad_token_id" else None if optional else 1
        elif isinstance(value, list) and len(value) == values.get("num_hidden_layers"):
            given[name] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
        elif size is not None and (_is_number(field.default) or name in OFTEN_NULL):
            given[name] = size
        elif name == "is_decoder":
            given[name] = True
        elif RANDOMNESS.search(name) and isinstance(value, float):
            given[name] = 0.1
        elif (
            isinstance(field.default, float)
            and field.default == 1.0
            and name.endswith(("multiplier", "scaling", "_scale"))
        ):
            given[name] = 0.7
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name in kind.sub_configs:
        if (part := getattr(default, name)) is not None:
            given[name] = tiny_config(type(part))
    return kind(**{**given, **EXCEPTIONS.get(kind.model_type, {}), **changes})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def tiny_model(config: "PreTrainedConfig", dtype: torch.dtype, seed: int = 0) -> "PreTrainedModel":
    """Return a model with random weights large enough that caps, masks and positions change its log-probs by more than 0.1."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():
            if not parameter.is_floating_point() or (parameter.dim() > 1 and not parameter.requires_grad):
                continue  # a constant of the architecture, such as RoFormer's table of angles
            if parameter.dim() > 1:
                parameter.data.normal_(std=SCALE / math.sqrt(parameter.shape[-1]))
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if (
                name.endswith("bias") and buffer.is_floating_point()
            ):  # others are constants of the architecture, such as decays
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def write_tiny(folder: Path, config: "PreTrainedConfig", dtype: torch.dtype) -> None:
    """Write a model of this configuration, as `from_pretrained` loads it."""
    tiny_model(config, dtype).save_pretrained(folder)


def rows() -> list[str]:
    """Return the rows of the table: the types of causal language models that transformers has, and variants of some."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def config_of(row: str) -> "PreTrainedConfig":
    """Return the tiny configuration of a row."""
    from transformers import CONFIG_MAPPING

    kind, changes = VARIANTS.get(row, (row, {}))
    return tiny_config(CONFIG_MAPPING[kind], **changes)
