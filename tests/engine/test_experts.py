"""Experts in an engine: replay, balance and differing choices, against transformers and formulas, in every way to save activations."""

import pytest
import torch
from on_ranks_experts import in_ways

from rlx.engine.micro_batches import MicroBatchRule

WHOLE = MicroBatchRule(rows=8)
ONE_PROCESS = [((8,), WHOLE), ((8,), MicroBatchRule(rows=3)), ((8,), MicroBatchRule(tokens=20))]
TWO_PROCESSES = [((4, 4), WHOLE), ((5, 3), MicroBatchRule(rows=2)), ((8, 0), MicroBatchRule(rows=3))]
WEIGHT = 0.7
# The router's softmax rounds to fp32 in a model of fp64.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def without(experts_folder, one_rank):
    ((gradients, _),) = one_rank("experts", "gradients", experts_folder, "fsdp2", ONE_PROCESS[:1])
    return gradients[0]


@pytest.fixture(scope="module")
def balance(experts_folder, one_rank):
    (found,) = one_rank("experts", "balance_by_transformers", experts_folder)
    return found


def has_balance(results, without, balance):
    loss, gradient = balance
    for found, metrics in zip(*results, strict=True):
        assert metrics["router_aux_loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert ((found - without) / WEIGHT - gradient).norm() <= TOLERANCE * gradient.norm()
        assert gradient.norm() > 1e-3


@pytest.mark.parametrize("model", [{}, {"use_remove_padding": False}, {"use_shared_prefix": False}], ids=str)
def test_balance_in_one_process_by_any_cut(model, experts_folder, without, balance, one_rank):
    (results,) = one_rank("experts", "gradients", experts_folder, "fsdp2", ONE_PROCESS, False, WEIGHT, None, model)
    has_balance(results, without, balance)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_balance_in_two_processes(strategy, experts_folder, without, balance, two_ranks):
    for results in two_ranks("experts", "gradients", experts_folder, strategy, TWO_PROCESSES, False, WEIGHT):
        has_balance(results, without, balance)


@pytest.mark.parametrize("replays", [False, True])
def test_log_probs_and_differing_experts(replays, experts_folder, one_rank):
    ((log_probs, differing),) = one_rank("experts", "figures_by_hand", experts_folder, replays)
    assert differing[differing > 0].mean() > 0.1
    for padded in (False, True):
        (found,) = one_rank("experts", "figures", experts_folder, replays, padded)
        torch.testing.assert_close(found["log_probs"], log_probs, rtol=0, atol=1e-6)
        torch.testing.assert_close(found["differing_experts"].double(), differing)
        used = torch.zeros_like(differing) if replays else differing
        torch.testing.assert_close(found["differing_experts_used"].double(), used)


TWICE = [((8,), MicroBatchRule(rows=4))] * 2
KEPT = {"enable_gradient_checkpointing": False}


@pytest.fixture(scope="module")
def kept(experts_folder, one_rank):
    """For own and replayed experts gradients and metrics without recomputation."""
    call = "gradients", experts_folder, "fsdp2", TWICE
    return [one_rank("experts", *call, replays, WEIGHT, None, KEPT)[0] for replays in (False, True)]


@pytest.mark.parametrize(
    ("save", "replays"), [(None, True), ("boundary", True), ("attention", False), ("auto", True), ("all", False)]
)
def test_gradients_are_those_without_recomputation_bit_by_bit(save, replays, kept, experts_folder, one_rank):
    plain, want = kept[replays]
    call = "gradients", experts_folder, "fsdp2", TWICE, replays, WEIGHT, save, KEPT if save == "all" else {}
    ((found, metrics),) = one_rank("experts", *call)
    assert torch.equal(found, plain)
    assert [m["router_aux_loss"] for m in metrics] == [m["router_aux_loss"] for m in want]


def test_replay_by_any_cut(experts_folder, one_rank, two_ranks):
    ((gradients, _),) = one_rank("experts", "gradients", experts_folder, "fsdp2", ONE_PROCESS, True, WEIGHT)
    want = gradients[0]
    results = two_ranks("experts", "gradients", experts_folder, "fsdp", TWO_PROCESSES, True, WEIGHT)
    call = "gradients", experts_folder, "fsdp2", ONE_PROCESS, True, WEIGHT, None, {"use_remove_padding": False}
    padded = one_rank("experts", *call)
    for found in (gradients, *(each for each, _ in (*results, *padded))):
        for gradient in found:
            assert (gradient - want).norm() <= TOLERANCE * want.norm()


EXPERT_ADAPTERS = {"lora_rank": 4, "target_modules": "all-linear,experts"}


@pytest.mark.parametrize("adapters", [{}, EXPERT_ADAPTERS], ids=["all weights", "of experts"])
def test_grouped_products_are_the_default_and_right(adapters, experts_folder, one_rank):
    ((eager, others),) = one_rank(
        "experts", "in_ways", experts_folder, torch.device("cpu"), adapters, ["boundary", "all"]
    )
    assert eager < 1e-6 and set(others.values()) == {0.0}


def test_adapters_of_experts_train_stream_and_leave(experts_folder, one_rank, tmp_path):
    """With everything resident, streamed, and from a checkpoint: the same bits; as the merged model; exported in peft's form."""
    ((resident, streamed), merged, loaded, exported) = one_rank(
        "experts", "adapted", experts_folder, str(tmp_path), EXPERT_ADAPTERS
    )[0]
    for one, other in zip(resident, streamed, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(streamed[1:], loaded, strict=True))
    torch.testing.assert_close(merged, streamed[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(exported, streamed[1], rtol=0, atol=1e-5)
    assert not torch.equal(streamed[0], streamed[1])


def test_replay_takes_the_mismatch_of_another_dtype_away(experts_folder, one_rank):
    (((own, differing, used), (replayed, _, none)),) = one_rank("experts", "mismatch", experts_folder, "bf16")
    assert differing == used > 0.005 and none == 0
    assert replayed < 0.9 * own
    ((equal, replayed),) = one_rank("experts", "mismatch", experts_folder, "fp32")
    assert equal[1:] == replayed[1:] == (0, 0)
    assert max(equal[0], replayed[0]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}], ids=["all weights", "LoRA"])
def test_grouped_products_are_taken_and_right(adapters, experts_folder, gpu):
    eager, others = in_ways(experts_folder, gpu, adapters, ["boundary", "attention", "all"])
    assert eager < 2e-2 and set(others.values()) == {0.0}
