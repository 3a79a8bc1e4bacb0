"""Shapes of published decoders by name, for forecasts without a network, the planner's command and benchmarks."""

from __future__ import annotations

import re
from typing import Any

_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, values, strict=True))
    for name, *values in (
        ("tiny", "qwen2", 64, 128, 8, 4, 2, 16, 1024),
        ("smollm2-135m", "llama", 576, 1536, 30, 9, 3, 64, 49152),
        ("qwen2-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936),
        ("qwen2-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936),
        ("qwen2.5-3b", "qwen2", 2048, 11008, 36, 16, 2, 128, 151936),
        ("qwen2-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064),
        ("qwen2.5-14b", "qwen2", 5120, 13824, 48, 40, 8, 128, 152064),
        ("qwen2.5-32b", "qwen2", 5120, 27648, 64, 40, 8, 128, 152064),
        ("qwen2.5-72b", "qwen2", 8192, 29568, 80, 64, 8, 128, 152064),
        ("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
        ("qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, 151936),
        ("qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936),
        ("qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936),
        ("qwen3-14b", "qwen3", 5120, 17408, 40, 40, 8, 128, 151936),
        ("qwen3-32b", "qwen3", 5120, 25600, 64, 64, 8, 128, 151936),
        ("llama3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256),
        ("llama3.2-3b", "llama", 3072, 8192, 28, 24, 8, 128, 128256),
        ("llama3-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256),
        ("llama3-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256),
        ("qwen3-30b-a3b", "qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936),
    )
}
for _small in (
    *("smollm2-135m", "qwen2-0.5b", "qwen2-1.5b", "qwen2.5-3b"),
    *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama3.2-1b", "llama3.2-3b"),
):
    SHAPES[_small] |= {"tie_word_embeddings": True}
SHAPES["qwen3-30b-a3b"] |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_HUB_NAME = re.compile(
    r"(?:qwen|meta-llama)/(?:meta-)?(qwen2|qwen2\.5|qwen3|llama-3(?:\.[12])?)-(?:math-|coder-)?([\d.]+b(?:-a3b)?)"
    r"(?:-instruct|-base)?(?:-2507)?"
)


def shape_named(hub_name: str) -> str | None:
    """Return the name in SHAPES of a model of the hub, such as Qwen/Qwen2.5-7B-Instruct; None if its shape is not known."""
    found = _HUB_NAME.fullmatch(hub_name.lower())
    if found is None:
        return None
    family, size = found[1].replace("llama-3.1", "llama3").replace("llama-", "llama"), found[2]
    same = {"qwen2.5": ("qwen2.5", "qwen2"), "qwen2": ("qwen2", "qwen2.5")}.get(family, (family,))
    return next((f"{each}-{size}" for each in same if f"{each}-{size}" in SHAPES), None)
