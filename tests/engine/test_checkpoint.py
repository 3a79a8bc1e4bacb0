import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rlx.export import export

STRATEGIES = ["fsdp2", "fsdp"]


@pytest.fixture(params=["one_rank", "two_ranks"])
def ranks(request):
    return request.getfixturevalue(request.param)


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_is_the_unbroken_one(strategy, used, model_folder, ranks, tmp_path):
    folder = str(tmp_path / "global_step_2" / "actor")
    unbroken = ranks("checkpoint", "stopped", model_folder, strategy, folder)
    resumed = ranks("checkpoint", "resumed", model_folder, strategy, folder, 0, used)
    for (metrics, saved, weights), again in zip(unbroken, resumed, strict=True):
        assert again[0] == metrics
        same(saved, again[1])
        same(weights, again[2])
    assert os.listdir(tmp_path / "global_step_2") == ["actor"], "nothing temporary is left"


def test_saving_before_the_first_update_leaves_the_optimizer_untouched(model_folder, one_rank, tmp_path):
    folder = str(tmp_path / "actor")
    ((metrics, _, weights),) = one_rank(
        "checkpoint", "stopped", model_folder, "fsdp2", folder, 0, ("model", "optimizer", "extra"), 0
    )
    ((again, _, resumed_weights, _),) = one_rank("checkpoint", "resumed", model_folder, "fsdp2", folder)
    ((fresh, fresh_weights),) = one_rank("checkpoint", "never_saved", model_folder)
    assert again == metrics == fresh
    same(weights, fresh_weights)
    same(weights, resumed_weights)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("one_rank", "fsdp"), ("two_ranks", "fsdp2")),
        (("two_ranks", "fsdp2"), ("one_rank", "fsdp")),
        (("two_ranks", "fsdp"), ("one_rank", "fsdp2")),
    ],
)
def test_a_checkpoint_is_read_by_other_process_counts_and_strategies(before, after, model_folder, request, tmp_path):
    folder = str(tmp_path / "actor")
    metrics, saved, weights = request.getfixturevalue(before[0])(
        "checkpoint", "stopped", model_folder, before[1], folder
    )[0]
    again = request.getfixturevalue(after[0])("checkpoint", "resumed", model_folder, after[1], folder)[0]
    same(saved, again[1])
    for figures, expected in zip(again[0], metrics, strict=True):
        # Each process samples its own shard, so another division samples other weights.
        del figures["update_length"], expected["update_length"]
        assert figures == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for name, tensor in weights.items():
        torch.testing.assert_close(again[2][name], tensor, rtol=1e-9, atol=1e-12)


def test_adapters_are_resumed(model_folder, two_ranks, tmp_path):
    folder = str(tmp_path / "actor")
    metrics, _, weights = two_ranks("checkpoint", "stopped", model_folder, "fsdp2", folder, 2)[0]
    again = two_ranks("checkpoint", "resumed", model_folder, "fsdp2", folder, 2)[0]
    assert again[0] == metrics
    same(weights, again[2])


def test_contents_left_out_start_anew(model_folder, one_rank, tmp_path):
    folder = str(tmp_path / "actor")
    ((_, saved, _),) = one_rank("checkpoint", "stopped", model_folder, "fsdp2", folder, 0, ("model",))
    assert sorted(os.listdir(folder)) == ["card", "checkpoint.json", "model"]
    ((metrics, loaded, _, _),) = one_rank("checkpoint", "resumed", model_folder, "fsdp2", folder)
    same(saved, loaded)
    assert metrics[0]["lr"] == pytest.approx(1e-2 / 3), "the schedule begins again"
    ((moments, schedule),) = one_rank("checkpoint", "warnings_of_loading", model_folder, folder)
    assert "no optimizer state" in moments and "schedule starts anew" in schedule


def test_a_whole_checkpoint_is_loaded_without_a_word(model_folder, one_rank, tmp_path):
    folder = str(tmp_path / "actor")
    one_rank("checkpoint", "stopped", model_folder, "fsdp2", folder)
    assert one_rank("checkpoint", "warnings_of_loading", model_folder, folder) == [[]]


def test_wrong_checkpoints_are_refused(model_folder, one_rank, tmp_path):
    assert "checkpoint.json" in one_rank("checkpoint", "refusal", model_folder, str(tmp_path))[0]
    folder = str(tmp_path / "critic")
    one_rank("checkpoint", "stopped", model_folder, "fsdp2", folder, 0, ("optimizer",), 1, "value")
    assert "head value" in one_rank("checkpoint", "refusal", model_folder, folder)[0]
    assert "save_contents" in one_rank("checkpoint", "refusal", model_folder, folder, "value")[0]


def test_a_crash_leaves_the_old_checkpoint(two_ranks, tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "whole").write_text("whole")
    two_ranks("checkpoint", "crash", str(tmp_path / "actor"))
    assert os.listdir(tmp_path / "actor") == ["whole"]


@pytest.mark.parametrize(("lora", "strategy"), [(0, "fsdp2"), (0, "fsdp"), (2, "fsdp2")])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_exports_load_and_say_the_same(head, lora, strategy, model_folder, two_ranks, tmp_path):
    (want, _) = two_ranks("checkpoint", "exported", model_folder, strategy, str(tmp_path / "actor"), lora, head)
    auto_class = {"lm": AutoModelForCausalLM, "value": AutoModelForTokenClassification}[head]
    export(tmp_path / "actor", tmp_path / "exported")
    for folder in (tmp_path / "exported", tmp_path / "actor" / "hf_model"):
        model, report = auto_class.from_pretrained(folder, output_loading_info=True)
        assert model.dtype == torch.float64
        assert not any(report.values())
        with torch.no_grad():
            said = model(input_ids=torch.arange(3, 20)[None]).logits
        torch.testing.assert_close(said, want, rtol=1e-9, atol=1e-9)
        assert model.config.use_cache
        assert AutoTokenizer.from_pretrained(folder).chat_template
