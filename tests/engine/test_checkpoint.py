"""Saving and loading with engines."""

import os
import re
import subprocess

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rlx.checkpoint.manifest import damage, damaged_chunks
from rlx.checkpoint.tensors import Piece, load_all
from rlx.engine import saving
from rlx.export import export


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("ranks", "strategy", "used"),
    [
        ("one_rank", "fsdp", False),
        ("one_rank", "fsdp2", True),
        ("two_ranks", "fsdp2", False),
        ("two_ranks", "fsdp", True),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(ranks, strategy, used, model_folder, request, tmp_path):
    ranks = request.getfixturevalue(ranks)
    folder = str(tmp_path / "global_step_2" / "actor")
    unbroken = ranks("checkpoint", "stopped", model_folder, strategy, folder)
    resumed = ranks("checkpoint", "resumed", model_folder, strategy, folder, 0, used)
    for (metrics, saved, weights), again in zip(unbroken, resumed, strict=True):
        assert again[0] == metrics
        same(saved, again[1])
        same(weights, again[2])
    assert os.listdir(tmp_path / "global_step_2") == ["actor"], "nothing temporary is left"
    assert not any(ranks("checkpoint", "warnings_of_loading", model_folder, folder))


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
    [(("one_rank", "fsdp"), ("two_ranks", "fsdp2")), (("two_ranks", "fsdp"), ("one_rank", "fsdp2"))],
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


@pytest.mark.slow
def test_adapters_are_resumed_on_another_number_of_processes(model_folder, one_rank, two_ranks, tmp_path):
    folder = str(tmp_path / "actor")
    metrics, saved, weights = two_ranks("checkpoint", "stopped", model_folder, "fsdp", folder, 2)[0]
    ((again, loaded, later, *_),) = one_rank("checkpoint", "resumed", model_folder, "fsdp2", folder, 2)
    same(saved, loaded)
    assert [figures["loss"] for figures in again] == pytest.approx([figures["loss"] for figures in metrics], rel=1e-9)
    for name, tensor in weights.items():
        torch.testing.assert_close(later[name], tensor, rtol=1e-9, atol=1e-12)


def test_adapters_of_another_scale_are_refused(model_folder, one_rank, tmp_path):
    (message,) = one_rank("checkpoint", "rescaled", model_folder, str(tmp_path / "actor"))
    assert "got adapters that are scaled by 4, expected 2 as configured; set model.lora_alpha" in message


def test_fp32_adapters_and_moments_on_a_bf16_base_are_resumed(model_folder, two_ranks, tmp_path):
    for before, after in two_ranks("checkpoint", "adapters_on_bf16", model_folder, str(tmp_path / "actor")):
        same(before, after)
        assert {tensor.dtype for tensor in after.values()} == {torch.float32, torch.bfloat16}


def test_contents_left_out_start_anew(model_folder, one_rank, tmp_path):
    folder = str(tmp_path / "actor")
    ((_, saved, _),) = one_rank("checkpoint", "stopped", model_folder, "fsdp2", folder, 0, ("model",))
    assert sorted(os.listdir(folder)) == ["card", "checkpoint.json", "manifest.json", "model"]
    ((metrics, loaded, _, _),) = one_rank("checkpoint", "resumed", model_folder, "fsdp2", folder)
    same(saved, loaded)
    assert metrics[0]["lr"] == pytest.approx(1e-2 / 3), "the schedule begins again"
    ((moments, schedule),) = one_rank("checkpoint", "warnings_of_loading", model_folder, folder)
    assert "no optimizer state" in moments and "schedule restarts" in schedule


@pytest.mark.parametrize(("strategy", "offload"), [("fsdp2", False), ("fsdp2", True), ("fsdp", True)])
def test_a_save_beside_training_holds_the_state_at_its_beginning(strategy, offload, model_folder, two_ranks, tmp_path):
    metrics = two_ranks("checkpoint", "saved_beside_training", model_folder, strategy, str(tmp_path), offload)[0]
    for part in ("model", "optimizer"):
        same(load_all(tmp_path / "at_once" / part), load_all(tmp_path / "beside" / part))
    assert damage(tmp_path / "beside") == damaged_chunks(tmp_path / "beside") == []
    resumed = two_ranks("checkpoint", "resumed", model_folder, strategy, str(tmp_path / "beside"))[0]
    assert resumed[0][0] == metrics


def test_bf16_weights_come_back_with_their_fp32_masters(model_folder, two_ranks, tmp_path):
    ranks = two_ranks("checkpoint", "with_masters", model_folder, "fsdp2", str(tmp_path / "actor"), True)
    for unbroken, *resumed in ranks:
        for metrics, weights in resumed:
            assert metrics == unbroken[0]
            same(unbroken[1], weights)
    state = load_all(tmp_path / "actor/optimizer")
    masters = {n: t for n, t in state.items() if n.endswith(".master")}
    assert masters and {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in load_all(tmp_path / "actor/model").values()} == {torch.bfloat16}
    # A step would replace the weights by masters of others.
    for path in (tmp_path / "actor/optimizer").iterdir():
        with safe_open(path, "pt") as file:
            state, metadata = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()  # noqa: SIM118
        forged = {n: t + 1 if n == "state.model.norm.weight.master" else t for n, t in state.items()}
        save_file(forged, path, metadata)
    (message, _) = two_ranks("checkpoint", "refusal", model_folder, str(tmp_path / "actor"), "lm", "bf16")
    assert "model.norm.weight.master is not the weight in fp32" in message


def test_a_state_without_masters_is_widened_and_one_with_them_is_not_narrowed(model_folder, two_ranks, tmp_path):
    for is_same, refusal in two_ranks("checkpoint", "widened", model_folder, str(tmp_path)):
        assert is_same
        assert "does not fit" in refusal and ".master is not in this model" in refusal
        assert "Continue with optim.optimizer, optim.master_weights and fsdp_config.model_dtype of the run" in refusal


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    (tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path / "disk"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", tmp_path / "disk"], check=True)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_named_and_only_the_older_checkpoint_is_left(in_background, model_folder, two_ranks, small_disk):
    newer = str(small_disk / "newer")
    for left_bytes, said in (
        (0, r"newer: this checkpoint needs \d\.\d+ MB, \d\.\d+ MB are free; free some space"),
        (8192, r"newer(/model/shard-0000\d-of-00002.safetensors)?: no space is left"),
    ):
        messages = two_ranks("checkpoint", "fills_the_disk", model_folder, newer, left_bytes, in_background)
        assert all(re.search(said, message.replace(".newer.partial", "newer")) for message in messages), messages
        assert sorted(os.listdir(small_disk)) == ["filler", "older"]
        assert damage(small_disk / "older") == damaged_chunks(small_disk / "older") == []


def test_wrong_checkpoints_are_refused(model_folder, one_rank, tmp_path):
    assert "checkpoint.json" in one_rank("checkpoint", "refusal", model_folder, str(tmp_path))[0]
    folder = str(tmp_path / "critic")
    one_rank("checkpoint", "stopped", model_folder, "fsdp2", folder, 0, ("optimizer",), 1, "value")
    assert "head value" in one_rank("checkpoint", "refusal", model_folder, folder)[0]
    assert "save_contents" in one_rank("checkpoint", "refusal", model_folder, folder, "value")[0]


@pytest.mark.parametrize(
    ("head", "lora", "strategy"), [("lm", 0, "fsdp2"), ("value", 0, "fsdp"), ("value", 2, "fsdp2")]
)
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_memory_is_read_in_place_and_nobody_waits_for_it(device):
    """Trained tensors are copied first, or if the device is another one, the optimizer waits until they are read."""
    frozen, trained = torch.zeros(6, 64), torch.zeros(64)
    state = {"a": frozen[2:4], "b": trained, "c": frozen[4:]}
    pieces = {"model": [Piece(name, (0,) * tensor.dim(), tensor) for name, tensor in state.items()]}
    found, live = saving._find_all(pieces, [], torch.device(device), {frozen.untyped_storage()})
    in_place = {f.piece.name: f for f in found["model"]}
    for name, tensor in (("a", frozen[2:4]), ("c", frozen[4:])):
        assert in_place[name].live is None
        assert in_place[name].on_host[0].data_ptr() == tensor.data_ptr()
    assert (in_place["b"].on_host is None) == (device == "cpu")
    assert live.pieces == (device != "cpu")
