"""Architectures of transformers that pass more than hidden states from layer to layer, with the cache that they make by default."""

import copy

import pytest
import torch
import transformers

from rlx.offload import OffloadOptions, enable_activation_offloading

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GEMMA = {
    **SMALL,
    "head_dim": 8,
    "sliding_window": 8,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONFIGS = {
    # The last layers attend to keys and values that earlier ones have left in a mapping, which all of them are called with.
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **{**GEMMA, "intermediate_size": [48] * 4}, laurel_rank=8, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0]
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA, global_head_dim=16),
    # Layers of several kinds, whose caches answer different questions.
    "bamba": lambda: transformers.BambaConfig(
        **SMALL,
        attn_layer_indices=[1, 3],
        mamba_d_state=8,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_chunk_size=8,
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **SMALL, **LINEAR, head_dim=16, layer_types=["linear_attention", "full_attention"] * 2
    ),
    # A cache of two caches, of which only that for attention to the own tokens has a length.
    "bart": lambda: transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=4,
        decoder_layers=4,
        decoder_ffn_dim=48,
        decoder_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.1,
        is_decoder=True,
    ),
    "mamba": lambda: transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, state_size=8),
}


def build(name):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).train()


def step(model, seed=3, rows=2, tokens=12):
    ids = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def accumulated(model):
    step(model, 1).backward()
    second, third = step(model, 2, rows=3, tokens=9), step(model, 4, rows=1, tokens=17)
    second.backward()
    return third


@pytest.mark.parametrize("run", [step, accumulated], ids=lambda run: run.__name__)
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_plain_autograd(compare, toys, name, run, saving):
    """A recomputed layer gets no cache. Models whose layers take another kernel with one differ by rounding on some processors."""
    model = build(name)
    assert model.config.use_cache
    with_cache, without = copy.deepcopy(model), copy.deepcopy(model)
    without.config.use_cache = saving["save"] == "all"
    compare(model, run, expected=toys.grade(without, run), **saving)
    for name, grad in toys.grade(with_cache, run).grads.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bamba", "bart", "qwen3_5", "mamba"])
def test_a_filled_cache_of_any_kind_is_refused_in_training(name):
    model = build(name)
    argument = "cache_params" if name == "mamba" else "past_key_values"
    handle = enable_activation_offloading(model, True, OffloadOptions(min_bytes=0))
    with torch.no_grad():
        cache = model(torch.arange(1, 9)[None], use_cache=True)[argument]
    with pytest.raises(ValueError, match=r"layers\.0 got a key/value cache that is filled.*use_cache=False"):
        model(torch.arange(1, 9)[None], **{argument: cache})
    handle.disable()
