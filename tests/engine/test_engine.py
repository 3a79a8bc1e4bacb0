"""The engine's methods."""

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from rlx.config.schema import ActivationOffloadConfig, LoraConfig, MixedPrecisionConfig
from rlx.data.batch import Batch

STRATEGIES = ["fsdp2", "fsdp"]


@pytest.fixture(params=[("one_rank", "fsdp"), ("two_ranks", "fsdp2"), ("two_ranks", "fsdp")], ids="-".join)
def world(request):
    """Processes to call, and how they share the model; FSDP2 in one process has tests of its own."""
    return request.getfixturevalue(request.param[0]), request.param[1]


@pytest.fixture
def ranks(world):
    return world[0]


@pytest.fixture
def strategy(world):
    return world[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_log_probs_and_values_are_those_of_each_row_alone(strategy, model_folder, one_rank, two_ranks):
    (want,) = one_rank("engine", "naive_per_token", model_folder)
    for shares in ((5, 3), (0, 8)):
        parts = two_ranks("engine", "per_token", model_folder, strategy, shares)
        assert [len(part["values"]) for part in parts] == list(shares)
        for name, expected in want.items():
            torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_weight_stream_is_the_model(strategy, head, model_folder, ranks):
    for fresh, trained, state, parameters in ranks("engine", "weights_and_names", model_folder, strategy, head):
        names = [name for name, _ in fresh]
        assert sorted(names) == sorted(parameters), "each tied weight once, under its first name"
        assert set(names) <= set(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in fresh), (
            "and not overwritten by the update since"
        )
        assert all(not torch.equal(trained[name], state[name]) for name in names)


@pytest.fixture(scope="session")
def bert_folder(model_folder, tmp_path_factory) -> str:
    """A BERT decoder, which names its embeddings among the classes that are not split, though the head shares their weight."""
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(
        transformers.BertConfig(
            **sizes, vocab_size=len(tokenizer), is_decoder=True, pad_token_id=tokenizer.pad_token_id
        )
    )
    assert "BertEmbeddings" in model._no_split_modules
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_tied_weights_stay_tied(strategy, bert_folder, ranks):
    for trained, expected, untrained in ranks("engine", "exported", bert_folder, strategy):
        torch.testing.assert_close(trained, expected, rtol=1e-9, atol=1e-9)
        assert (trained - untrained).abs().max() > 1e-3


def test_a_step_that_is_not_finite_is_skipped_everywhere(strategy, model_folder, ranks):
    for first, second, alone, before, between, after, other in ranks(
        "engine", "non_finite_step", model_folder, strategy
    ):
        assert first["skipped"] == 1 and second["skipped"] == 0
        assert second == alone, "the schedule went on, nothing else did"
        for name, tensor in before.items():
            assert torch.equal(between[name], tensor)
            assert torch.equal(after[name], other[name])


def test_gradients_are_clipped_by_their_global_norm(strategy, model_folder, ranks):
    for metrics, (free, bound) in ranks("engine", "clipped", model_folder, strategy):
        assert metrics[0]["grad_norm"] == metrics[1]["grad_norm"] == pytest.approx(free.norm().item(), rel=1e-12)
        torch.testing.assert_close(bound, free * 0.01 / free.norm(), rtol=1e-12, atol=0)


LORA = {"lora_rank": 2}
OFFLOAD = {"enable_activation_offload": True, "activation_offload": ActivationOffloadConfig(min_bytes=0)}
PARKED = [
    ("one_rank", "fsdp", {}, {}),
    ("two_ranks", "fsdp2", {}, {}),
    ("two_ranks", "fsdp", {}, LORA),
    ("two_ranks", "fsdp2", {"reshard_after_forward": "never"}, OFFLOAD),
]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "strategy", "fsdp", "model"), PARKED)
def test_waiting_in_host_memory_changes_nothing_and_the_second_cycle_takes_no_more(
    processes, strategy, fsdp, model, model_folder, request, tmp_path
):
    ranks = request.getfixturevalue(processes)
    for (stayed, moved), holders, room, left in ranks(
        "engine", "offloaded", model_folder, strategy, fsdp, model, str(tmp_path)
    ):
        assert moved[0] == stayed[0]
        assert all(torch.equal(stayed[1][name], moved[1][name]) for name in stayed[1])
        parameters, state = "actor_parameters", "actor_optimizer_state"
        assert holders[0][parameters] > 0 == holders[0][state], "no state before the first step"
        assert all(held[parameters] == holders[0][parameters] for held in holders)
        assert holders[1][state] > (0 if "lora_rank" in model else 2 * holders[1][parameters] - 1)
        assert room[0] == room[1] == room[2]
        assert left == [[0, 0]] * 3


@pytest.mark.parametrize(
    ("processes", "strategy", "lora"),
    [
        ("one_rank", "fsdp2", LoraConfig()),
        ("two_ranks", "fsdp2", LoraConfig(use_dora=True)),
        pytest.param("two_ranks", "fsdp", LoraConfig(), marks=pytest.mark.slow),
    ],
)
def test_the_policy_with_its_adapters_off_is_the_reference_bit_for_bit(
    processes, strategy, lora, model_folder, request
):
    ranks = request.getfixturevalue(processes)
    for separate, off, on, untrained in ranks("engine", "reference", model_folder, strategy, lora):
        assert torch.equal(off, separate) and torch.equal(untrained, separate)
        assert not torch.allclose(on, separate, atol=1e-6)


@pytest.mark.parametrize("rows", [8, 1])
def test_adapters_on_a_bf16_base_take_updates_that_bf16_would_hide(rows, model_folder, two_ranks):
    for types, changed, base in two_ranks("engine", "small_updates_on_bf16", model_folder, rows):
        assert types == {torch.float32} and base == {torch.bfloat16}
        assert changed > 0.9


def close(one, other, tolerance=1e-9):
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=tolerance, atol=1e-12)


@pytest.fixture(scope="module")
def plain_training(model_folder, one_rank):
    return one_rank("engine", "trained", model_folder, "fsdp2")[0]


VARIANTS = [
    ("fsdp2", {}),
    ("fsdp", {}),
    ("fsdp2", {"reshard_after_forward": False, "forward_prefetch": True}),
    ("fsdp", {"reshard_after_forward": False, "forward_prefetch": True}),
    ("fsdp2", {"reshard_after_forward": "never"}),
    ("fsdp2", {"reshard_after_forward": "never", "fsdp_size": 1}),
]


@pytest.mark.parametrize(("strategy", "fsdp"), VARIANTS)
def test_two_processes_train_like_one_however_they_share_the_model(
    strategy, fsdp, plain_training, model_folder, two_ranks
):
    for metrics, _, weights, _ in two_ranks("engine", "trained", model_folder, strategy, 2, fsdp):
        close(plain_training[2], weights)
        for figures, expected in zip(metrics, plain_training[0], strict=True):
            # Each process samples its own shard, so another division samples other weights.
            assert figures.pop("update_length") == pytest.approx(expected["update_length"], rel=0.05)
            expected = {name: figure for name, figure in expected.items() if name != "update_length"}
            assert figures == pytest.approx(expected, rel=1e-9, abs=1e-12)


MIXED = {"model_dtype": "bf16", "mixed_precision": MixedPrecisionConfig(param_dtype="bf16", reduce_dtype="fp32")}


@pytest.mark.parametrize(
    ("head", "fsdp", "model"), [("lm", {}, {}), ("lm", MIXED, {}), ("value", MIXED, LORA), ("value", MIXED, OFFLOAD)]
)
def test_what_stays_whole_is_gathered_and_summed_once_an_update(head, fsdp, model, model_folder, two_ranks):
    never = fsdp | {"reshard_after_forward": "never"}
    once = two_ranks("engine", "collectives", model_folder, never, head, model)
    often = two_ranks("engine", "collectives", model_folder, fsdp, head, model)
    for (counts, metrics, gradients), (others, expected, wanted) in zip(once, often, strict=True):
        assert [counts[name] for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")] == [1, 1]
        assert min(others[name] for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")) > 8
        assert metrics == pytest.approx(expected, rel=0.05 if fsdp else 1e-9)
        for one, other in zip(gradients, wanted, strict=True):
            assert (one - other).norm() <= (5e-3 if fsdp else 1e-9) * other.norm()


def test_bf16_compute_comes_near_the_fp64_gradient(strategy, plain_training, model_folder, ranks):
    fsdp = {"model_dtype": "fp32", "mixed_precision": MixedPrecisionConfig(param_dtype="bf16", reduce_dtype="fp32")}
    want = plain_training[1][0]
    for _, gradients, weights, _ in ranks("engine", "trained", model_folder, strategy, 1, fsdp):
        assert gradients[0].dtype == torch.float32
        assert (gradients[0] - want).norm() < 0.05 * want.norm()
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_streamed_weights_are_copies_also_of_whole_shards(model_folder, two_ranks):
    assert all(all(copies) for copies in two_ranks("engine", "weights_are_copies", model_folder))


@pytest.mark.parametrize(
    ("save", "tier", "strategy"), [("boundary", "cpu", "fsdp"), ("attention", "disk", "fsdp2"), ("all", "cpu", "fsdp2")]
)
def test_activation_offload_changes_no_bit(save, tier, strategy, model_folder, two_ranks, tmp_path):
    off = {"enable_gradient_checkpointing": save != "all"}
    directory = str(tmp_path) if tier == "disk" else None
    options = ActivationOffloadConfig(save=save, tier=tier, directory=directory, min_bytes=0)
    on = off | {"enable_activation_offload": True, "activation_offload": options}
    fsdp = {"reshard_after_forward": "never"} if save == "attention" else None
    plain = two_ranks("engine", "trained", model_folder, strategy, 2, fsdp, off)
    offloaded = two_ranks("engine", "trained", model_folder, strategy, 2, fsdp, on)
    for (metrics, gradients, weights, none), other in zip(plain, offloaded, strict=True):
        assert none == {} and other[3]["offloaded_bytes"] > 0 and other[3]["held_bytes"] == 0
        assert other[0] == metrics
        assert all(torch.equal(a, b) for a, b in zip(gradients, other[1], strict=True))
        assert all(torch.equal(other[2][name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_gradients_of_bf16_weights_are_summed_over_micro_batches_in_reduce_dtype(
    reduce_dtype, strategy, ranks, model_folder
):
    for dtype, is_exact, narrow_error in ranks(
        "engine", "sums_over_micro_batches", model_folder, strategy, reduce_dtype
    ):
        assert dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[reduce_dtype]
        assert is_exact
        assert (narrow_error > 1e-3) == (reduce_dtype == "fp32"), "24 sums in bf16 would lose what fp32 keeps"


def test_a_tensor_is_gathered_whole_however_its_rows_divide(two_ranks):
    for tensors, gathered in two_ranks("engine", "gathered", [(1,), (3,), (4, 2), (5, 3, 2)]):
        for tensor, found in zip(tensors, gathered, strict=True):
            assert all(torch.equal(each, tensor) for each in found)


def test_on_the_cpu_weights_are_not_gathered_by_the_operation_that_crashes_gloo(model_folder, two_ranks):
    for names in two_ranks("engine", "operations_of_the_stream", model_folder):
        assert any("c10d::allgather" in name for name in names)
        assert not [name for name in names if name.startswith("_c10d_functional")]


@pytest.fixture(scope="module")
def reward_folder(model_folder, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("reward")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def alone(folder: str, batch: Batch) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return torch.stack([model(input_ids=ids[mask][None]).logits[0, 0] for ids, mask in rows])


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_scores_are_those_of_each_sequence_alone(strategy, reward_folder, one_rank, two_ranks):
    (batch,) = one_rank("engine", "make_batch")
    want = alone(reward_folder, batch)
    assert want.std() > 1e-3
    for ranks, shares in ((one_rank, (8,)), (two_ranks, (5, 3)), (two_ranks, (0, 8))):
        for found in zip(*ranks("engine", "scores", reward_folder, strategy, shares), strict=True):
            torch.testing.assert_close(torch.cat(found), want, rtol=1e-10, atol=1e-10)


ATTENTION = {"enable_activation_offload": True, "activation_offload": ActivationOffloadConfig("attention", min_bytes=0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"),
    [("fsdp2", {}), ("fsdp2", ATTENTION), ("fsdp", {"lora_rank": 2})],
    ids=["checkpointing", "attention", "lora"],
)
def test_an_engine_in_tiles_learns_the_same_and_gathers_no_more(strategy, model, model_folder, two_ranks):
    whole = two_ranks("engine", "in_tiles", model_folder, strategy, model)
    tiled = two_ranks("engine", "in_tiles", model_folder, strategy, {**model, "tiled_mlp": 4})
    for (said, norms, weights, gathers), expected in zip(tiled, whole, strict=True):
        torch.testing.assert_close(said, expected[0], rtol=1e-12, atol=1e-12)
        assert gathers == expected[3] > 0
        assert norms == pytest.approx(expected[1], rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[2][name], rtol=0, atol=1e-5)
