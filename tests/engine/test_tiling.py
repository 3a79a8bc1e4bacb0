import pytest
import torch

from rlx.config.schema import ActivationOffloadConfig

OFFLOAD = {"enable_activation_offload": True, "activation_offload": ActivationOffloadConfig("attention", min_bytes=0)}


@pytest.mark.parametrize(
    ("strategy", "model"),
    [("fsdp2", {}), ("fsdp2", OFFLOAD), ("fsdp", OFFLOAD), ("fsdp", {"lora_rank": 2})],
    ids=["fsdp2-checkpointing", "fsdp2-attention", "fsdp-attention", "fsdp-lora"],
)
def test_an_engine_in_tiles_learns_the_same_and_gathers_no_more(strategy, model, model_folder, two_ranks):
    whole = two_ranks("tiling", "trained", model_folder, strategy, model)
    tiled = two_ranks("tiling", "trained", model_folder, strategy, {**model, "tiled_mlp": 4})
    for (said, norms, weights, gathers), expected in zip(tiled, whole, strict=True):
        torch.testing.assert_close(said, expected[0], rtol=1e-12, atol=1e-12)
        assert gathers == expected[3] > 0
        assert norms == pytest.approx(expected[1], rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[2][name], rtol=0, atol=1e-5)
