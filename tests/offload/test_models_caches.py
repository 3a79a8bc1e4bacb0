"""Architectures of transformers that pass more than hidden states from layer to layer, with the cache that they make by default."""

import copy

import pytest
import torch
import transformers

from rlx.offload import OffloadOptions, enable_activation_offloading
from tests.tiny_models import config_of

# Gemma's last layers attend to keys and values that earlier ones have left in a mapping, which all of them are called with.
# Bamba, Qwen3.5 and Mamba have layers of several kinds, whose caches answer different questions. BART's cache is one of two
# caches, of which only that for attention to the own tokens has a length.
ROWS = ["gemma4_text", "bamba", "qwen3_5_text", "bart", "mamba"]


def build(row):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(row)).train()


def step(model, seed=3, rows=2, tokens=12):
    ids = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def accumulated(model):
    step(model, 1).backward()
    second, third = step(model, 2, rows=3, tokens=9), step(model, 4, rows=1, tokens=17)
    second.backward()
    return third


@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_those_of_plain_autograd(compare, toys, name, saving):
    """A recomputed layer gets no cache. Models whose layers take another kernel with one differ by rounding on some processors."""
    model = build(name)
    assert model.config.use_cache
    with_cache, without = copy.deepcopy(model), copy.deepcopy(model)
    without.config.use_cache = saving["save"] == "all"
    compare(model, accumulated, expected=toys.grade(without, accumulated), **saving)
    for name, grad in toys.grade(with_cache, accumulated).grads.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bamba", "bart", "qwen3_5_text", "mamba"])
def test_a_filled_cache_of_any_kind_is_refused_in_training(name):
    model = build(name)
    argument = "cache_params" if name == "mamba" else "past_key_values"
    handle = enable_activation_offloading(model, True, OffloadOptions(min_bytes=0))
    with torch.no_grad():
        cache = model(torch.arange(1, 9)[None], use_cache=True)[argument]
    with pytest.raises(ValueError, match=r"layers\.0 got a key/value cache that is filled.*use_cache=False"):
        model(torch.arange(1, 9)[None], **{argument: cache})
    handle.disable()
