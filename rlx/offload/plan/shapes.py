"""Shapes of published decoders by name, for the planner's command and for benchmarks."""

from __future__ import annotations

from typing import Any

_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, values, strict=True))
    for name, *values in (
        ("tiny", "qwen2", 64, 128, 8, 4, 2, 16, 1024),
        ("qwen2-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936),
        ("qwen2-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064),
        ("qwen2.5-14b", "qwen2", 5120, 13824, 48, 40, 8, 128, 152064),
        ("qwen2.5-32b", "qwen2", 5120, 27648, 64, 40, 8, 128, 152064),
        ("qwen2.5-72b", "qwen2", 8192, 29568, 80, 64, 8, 128, 152064),
        ("qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936),
        ("llama3-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256),
        ("llama3-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256),
        ("qwen3-30b-a3b", "qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936),
    )
}
SHAPES["qwen2-0.5b"] |= {"tie_word_embeddings": True}
SHAPES["qwen3-30b-a3b"] |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
