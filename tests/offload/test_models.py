"""Real transformers architectures: gradients bit for bit as without the engine."""

import pytest
import torch
from tiny_transformers import CONFIGS, build

from rlx.offload import OffloadOptions, enable_activation_offloading


def step(model, seed=3, rows=2, tokens=12):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 64, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def packed(model):
    """Two sequences in one row, told apart by their positions."""
    ids = torch.randint(1, 64, (1, 14), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(9), torch.arange(5)])[None]
    return model(input_ids=ids, labels=ids, position_ids=positions).loss


def accumulated(model):
    """Micro-batches of several lengths, two of their graphs alive at once."""
    step(model, 1).backward()
    second, third = step(model, 2, rows=3, tokens=9), step(model, 4, rows=1, tokens=17)
    second.backward()
    return third


def under_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step(model)


STEPS = {"padded": step, "packed": packed, "accumulated": accumulated, "autocast": under_autocast}


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in CONFIGS), ("qwen2", "eager")])
def test_gradients_are_those_of_plain_autograd(compare, name, attention, mode):
    stats = compare(build(name, attention), step, **mode)
    boundary = 3 * (2 * 12 * 32 * 4)
    if mode["save"] == "boundary" or (mode["save"] == "attention" and attention == "eager"):
        assert stats.offloaded_bytes == boundary  # the layers' inputs; attention written out is recomputed
    else:
        assert stats.offloaded_bytes > 2 * boundary


@pytest.mark.parametrize("kind", list(STEPS)[1:])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_of_other_kinds(compare, name, kind, every_saving):
    compare(build(name), STEPS[kind], **every_saving)


def test_generation_is_untouched():
    model = build("qwen3").eval()
    ids = torch.arange(1, 9)[None]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    handle = enable_activation_offloading(model, True, OffloadOptions(min_bytes=0))
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    with torch.enable_grad():
        cache = model(ids).past_key_values
        assert cache.get_seq_length() == 8
        assert model(ids[:, :1], past_key_values=cache).past_key_values.get_seq_length() == 9
    handle.disable()
    assert handle.stats().offloaded_bytes == 0


@pytest.mark.parametrize(("name", "kind"), [("qwen2", "packed"), ("gemma3", "accumulated"), ("gpt2", "autocast")])
def test_lora_on_a_frozen_embedding(compare, name, kind, saving):
    peft = pytest.importorskip("peft", reason="the extra `lora` is not installed")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", fan_in_fan_out=name == "gpt2")
    model = peft.get_peft_model(build(name), config)
    for parameter, p in model.named_parameters():
        if "lora_B" in parameter:
            torch.nn.init.normal_(p, std=0.1)
    assert not model.get_input_embeddings().weight.requires_grad
    stats = compare(model, STEPS[kind], **saving)
    assert stats.offloaded_bytes > 0
