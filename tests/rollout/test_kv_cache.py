import torch
from transformers import DynamicCache, MistralConfig, Qwen3Config
from transformers.cache_utils import DynamicLayer

from rlx.rollout.hf_decoder import GrowingLayer, growing_cache


def test_a_growing_layer_holds_what_a_dynamic_one_holds():
    torch.manual_seed(0)
    ours, theirs = GrowingLayer(extra_tokens=2), DynamicLayer()
    rows = torch.tensor([2, 0, 0])
    for step, new in enumerate((5, 1, 1, 1, 1, 3)):  # outgrows its room twice
        states = torch.randn(3, 2, new, 4), torch.randn(3, 2, new, 4)
        for got, want in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(got, want)
        if step in (0, 2):
            ours.reorder_cache(rows)
            theirs.reorder_cache(rows)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_appending_within_the_room_copies_nothing():
    layer = GrowingLayer(extra_tokens=4)
    first, _ = layer.update(torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2))
    second, _ = layer.update(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 1, 2))
    assert first.data_ptr() == second.data_ptr()


def test_other_kinds_of_layers_stay_transformers_own():
    assert all(type(layer) is GrowingLayer for layer in growing_cache(Qwen3Config(num_hidden_layers=2), 4).layers)
    sliding = MistralConfig(num_hidden_layers=2, sliding_window=8)
    kinds = [type(layer) for layer in growing_cache(sliding, 4).layers]
    assert kinds == [type(layer) for layer in DynamicCache(config=sliding).layers] and GrowingLayer not in kinds
