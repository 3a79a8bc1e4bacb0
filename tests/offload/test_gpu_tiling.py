"""Tiles on a device: gradients near those without, and the memory of one tile."""

import copy
import logging
from functools import partial

import pytest
import torch
import transformers

from rlx.offload import OffloadOptions, enable_activation_offloading, enable_tiling

pytestmark = [pytest.mark.gpu]
WIDTH, INNER, TOKENS, TILE = 1024, 5408, 16_384, 2048


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.cuda().train()


def step(model: torch.nn.Module) -> int:
    """Forward and backward; the peak above what was there before [bytes]."""
    ids = torch.randint(0, 1024, (1, TOKENS), generator=torch.Generator().manual_seed(1)).cuda()
    used = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = model(input_ids=ids, use_cache=False).last_hidden_state
    output.backward(torch.ones_like(output))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - used


@pytest.mark.parametrize("save", [None, "boundary", "attention"])
def test_gradients_are_near_and_the_peak_is_that_of_a_tile(save):
    plain = build()
    tiled = copy.deepcopy(plain)
    assert len(enable_tiling(tiled, TILE).mlps) == 3
    peaks = []
    for model in (plain, tiled):
        if save is not None:
            enable_activation_offloading(model, True, OffloadOptions(save=save))
        step(model)
        model.zero_grad(set_to_none=False)
        peaks.append(step(model))
    for (name, p), q in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        assert (p.grad - q.grad).float().norm() <= 0.02 * p.grad.float().norm(), name
    assert peaks[0] - peaks[1] >= 3 * TOKENS * INNER * 2, "of at least five such tensors those of one tile are left"


def test_an_mlp_on_several_streams_keeps_its_gradients(caplog):
    caplog.set_level(logging.INFO, "rlx.offload")
    plain, tiled = build(), build()
    for model in (plain, tiled):
        for layer in model.layers:
            layer.mlp.forward = partial(gate_on_the_side, layer.mlp, torch.cuda.Stream())
    enable_tiling(tiled, TILE)
    for model in (plain, tiled):
        step(model)
    assert any("computes on several streams" in record.getMessage() for record in caplog.records)
    for (name, p), q in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        assert (p.grad - q.grad).float().norm() <= 0.02 * p.grad.float().norm(), name


def gate_on_the_side(mlp: torch.nn.Module, side: torch.cuda.Stream, x: torch.Tensor) -> torch.Tensor:
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.record_stream(side)
        gate = mlp.act_fn(mlp.gate_proj(x))
    up = mlp.up_proj(x)
    main.wait_stream(side)
    gate.record_stream(main)
    return mlp.down_proj(gate * up)
