"""One process without FSDP2 computes what it computes with it."""

import pytest
import torch

from rlx.config.schema import ActivationOffloadConfig, MixedPrecisionConfig
from rlx.engine.sharding import Precision, casts

LORA = {"lora_rank": 2}


def offload(save):
    options = ActivationOffloadConfig(save=save, min_bytes=0)
    checkpoints = {"enable_gradient_checkpointing": save != "all"}
    return checkpoints | {"enable_activation_offload": True, "activation_offload": options}


@pytest.mark.parametrize(
    ("stored", "compute", "rows", "model"),
    [
        ("fp32", "bf16", 3, {}),
        ("fp32", "bf16", 8, {}),  # one micro-batch: nothing is summed
        ("fp32", "bf16", 3, offload("all")),
        ("fp32", "bf16", 3, offload("boundary")),
        ("fp32", "bf16", 3, offload("auto")),
        ("fp32", "bf16", 3, LORA),
        ("bf16", "bf16", 3, LORA),  # adapters are fp32
    ],
)
def test_results_equal_those_of_fsdp2_bit_for_bit(stored, compute, rows, model, model_folder, one_rank):
    (found,) = one_rank("single", "both", model_folder, stored, compute, rows, model)
    (kind, log_probs, metrics, gradients, weights), (other_kind, *other) = found
    assert (kind, other_kind) == ("SingleModel", "FSDP2Model")
    assert torch.equal(log_probs, other[0])
    assert metrics == other[1]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(gradients, other[2], strict=True))
    assert gradients and set(weights) == set(other[3])
    assert all(torch.equal(tensor, other[3][name]) for name, tensor in weights.items())


def test_fsdp2_serves_one_process_only_where_weights_are_copied_layer_by_layer(model_folder, one_rank):
    bf16 = {"mixed_precision": MixedPrecisionConfig(param_dtype="bf16")}
    cases = [
        ({}, "SingleModel"),
        ({"reshard_after_forward": True}, "SingleModel"),  # nothing is copied
        (bf16, "SingleModel"),
        (bf16 | {"reshard_after_forward": False, "param_offload": True}, "SingleModel"),
        (bf16 | {"reshard_after_forward": True}, "FSDP2Model"),
        (bf16 | {"param_offload": True}, "FSDP2Model"),
        (bf16 | {"optimizer_offload": True}, "FSDP2Model"),
        ({"offload_policy": True}, "FSDP2Model"),
        ({"model_dtype": "bf16", "mixed_precision": MixedPrecisionConfig(param_dtype="fp32")}, "FSDP2Model"),
    ]
    (found,) = one_rank("single", "kinds", model_folder, [settings for settings, _ in cases])
    assert found == [kind for _, kind in cases]


def test_layers_get_inputs_in_the_type_of_computation(model_folder, one_rank):
    (found,) = one_rank("single", "wide_inputs", model_folder)
    assert found == [{torch.bfloat16}] * 2


def test_parameters_are_not_the_memory_of_the_file_that_they_came_from(model_folder, one_rank):
    (found,) = one_rank("single", "own_memory", model_folder)
    assert found and all(found)


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_gradients_of_each_micro_batch_are_summed_as_they_are(stored, model_folder, one_rank):
    (found,) = one_rank("single", "wide_norms", model_folder, stored)
    alone, twice = found
    assert torch.equal(alone, twice)


def test_an_exception_leaves_no_copies_and_no_gradients(model_folder, one_rank, tmp_path):
    ((saved, is_as_usual),) = one_rank("single", "interrupted", model_folder, str(tmp_path / "checkpoint"))
    assert saved == {torch.float32}
    assert is_as_usual


def test_weights_that_a_model_keeps_wide_stay_so_unless_they_are_trained():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)])
    bf16 = Precision(torch.bfloat16, torch.bfloat16, torch.float32)
    assert casts(bf16, model)
    assert not casts(bf16, model.requires_grad_(False))
