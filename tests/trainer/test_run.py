"""Whole runs: what must not change a result, what must survive a stop, what must be refused."""

import json
import os
import re
import shutil

import psutil
import pytest
import torch
from run_tools import described, metrics_of, results, resume_from
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlx.checkpoint import manifest
from rlx.driver import main
from rlx.export import main as export_main
from rlx.trainer.checkpoints import ResumeError
from rlx.trainer.timeline import read_timeline

pytestmark = pytest.mark.e2e

REWARDS = """
import os, signal, psutil
from pathlib import Path

def varied(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 16

def mixed(data_source, solution_str, ground_truth, extra_info=None):
    return float(any(letter in solution_str for letter in "abcdefghijk"))

def policy_loss(log_probs, old_log_probs, advantages, mask, settings):
    ratio = (log_probs - old_log_probs).exp()
    return -advantages * ratio, {"own_ratio": ratio, "loss": ratio}

def asks_to_end(data_source, solution_str, ground_truth, extra_info=None):
    try:
        Path(__file__).with_name("asked").touch(exist_ok=False)  # once
        os.kill(psutil.Process().ppid(), signal.SIGTERM)  # the driver
    except FileExistsError:
        pass
    return len(set(solution_str)) / 16

def kills_a_worker(data_source, solution_str, ground_truth, extra_info=None):
    if not any(file.stat().st_size for file in Path(__file__).parent.glob("runs/*/metrics.jsonl")):
        return {"score": 0.5, "seen": 1.0}  # in the first step
    for process in psutil.Process().parent().children(recursive=True):  # of the driver
        try:
            if "ray::WorkerProcess" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
        except psutil.Error:
            continue  # it is a zombie already
    return 0.0
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return lambda name: (f"custom_reward_function.path={path}", f"custom_reward_function.name={name}")


@pytest.mark.slow
def test_ppo_on_two_processes_resumes_and_its_critic_offloads(train, custom, capfd, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = [
        *(*custom("varied"), "trainer.total_training_steps=3", "trainer.save_freq=2", "algorithm.adv_estimator=gae"),
        *("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "trainer.n_gpus_per_node=2"),
        *("trainer.critic_warmup=1", "actor_rollout_ref.actor.strategy=fsdp"),
        *("actor_rollout_ref.model.activation_offload.save=attention", "critic.model.activation_offload.min_bytes=0"),
        *("critic.model.activation_offload.tier=disk", "critic.ulysses_sequence_parallel_size=2"),
        *(f"critic.model.activation_offload.directory={disk}", "actor_rollout_ref.actor.optim.lr_warmup_steps=3"),
        *("trainer.max_actor_ckpt_to_keep=2", "algorithm.rollout_correction.rollout_is=sequence"),
        "algorithm.rollout_correction.rollout_rs=[token_k1,seq_max_k2]",
        "algorithm.rollout_correction.rollout_rs_threshold=[0.5_2.0,0.1]",
        "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
    ]
    folder, unbroken = train(*options)
    assert [name for name in unbroken[3] if "/" in name and not described(name)] == []
    assert "actor/grad_norm" not in unbroken[1], "only the critic learns in its warm-up"
    assert unbroken[2]["actor/grad_norm"] > 0 and unbroken[1]["critic/grad_norm"] > 0
    assert unbroken[3]["correction/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert unbroken[3]["correction/rejected_token_share"] == 0 < unbroken[3]["mismatch/mean_abs_log_prob"] < 1e-4
    assert unbroken[3]["actor/reward_kl_coef"] != unbroken[1]["actor/reward_kl_coef"]
    for role in ("actor", "critic"):
        assert unbroken[3][f"perf/offload/{role}/offloaded_bytes"] > 0 == unbroken[3][f"perf/offload/{role}/held_bytes"]
    assert unbroken[3]["perf/offload/critic/disk_bytes"] > 0 == unbroken[3]["perf/offload/actor/disk_bytes"]
    assert 0 < unbroken[3]["perf/stall_share"] < 1 and not list(disk.iterdir())
    last = read_timeline(folder / "timeline.json")["last"]
    assert (last["step"], len(last["processes"]), set(last["copies"])) == (3, 2, {"actor", "critic"})
    assert {"rollout", "values", "update_critic", "update_actor", "sync"} <= {name for name, *_ in last["phases"]}
    # Resumed without offloading: what it changed, and what the checkpoint left out, would both show.
    no_offload = (f"{role}.model.enable_activation_offload=False" for role in ("actor_rollout_ref", "critic"))
    again, resumed = train(*options, *resume_from(folder, 2), *no_offload)
    assert again == folder
    printed = capfd.readouterr()
    assert f"resuming from step 2: {folder}" in printed.out + printed.err
    assert resumed[3]["perf/offloaded_mb"] == 0 and read_timeline(folder / "timeline.json")["last"]["copies"] == {}
    assert results(resumed[3]) == results(unbroken[3])


@pytest.mark.slow
def test_a_run_passes_over_damaged_checkpoints_resumes_on_other_processes_and_begins_anew_without_a_whole_one(
    train, custom, capfd, monkeypatch
):
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)  # so that the workers find the damage and not the driver
    options = [*custom("varied"), "trainer.total_training_steps=3", "trainer.save_freq=1"]
    options += ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"]
    folder, unbroken = train(*options, "actor_rollout_ref.actor.checkpoint.async_save=True")
    saved = folder / "checkpoints"
    assert sorted(os.listdir(saved)) == [f"global_step_{step}" for step in (1, 2, 3)]
    for step in (2, 3):
        (shard,) = (saved / f"global_step_{step}/actor/optimizer").iterdir()
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
    rows = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ResumeError, match=r"_2 cannot be used: .* bytes 0 to \d+ have changed.*; name .*_step_3"):
        train(*options, *resume_from(folder, 2))
    assert rows == (folder / "metrics.jsonl").read_bytes(), "a run that cannot start takes none away"
    assert not (saved / "superseded").exists()
    auto = [*options, "trainer.resume_mode=auto"]
    assert train(*auto, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=fsdp")[0] == folder
    printed = capfd.readouterr()
    assert all(f"passed over global_step_{step}" in printed.out + printed.err for step in (2, 3))
    assert sorted(os.listdir(saved / "superseded")) == ["global_step_2", "global_step_3"]
    assert len(os.listdir(saved / "global_step_2/actor/model")) == 2, "one file of each process"
    shutil.rmtree(saved / "global_step_3")
    _, resumed = train(*auto)
    assert len(os.listdir(saved / "global_step_3/actor/model")) == 1
    # Rounding differs between numbers of processes, so in step 3 a token may be another one.
    for step, rel in ((2, 1e-3), (3, 0.05)):
        for name in ("reward/mean", "actor/grad_norm", "actor/lr", "train/policy_version"):
            assert resumed[step][name] == pytest.approx(unbroken[step][name], rel=rel), (step, name)

    for shard in saved.glob("global_step_*/actor/optimizer/*"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    again, anew = train(*auto)
    printed = capfd.readouterr()
    assert again == folder and "passed over global_step_1" in printed.out + printed.err
    assert [results(row) for row in anew.values()] == [results(row) for row in unbroken.values()]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_run_on_a_url_resumes_from_there_on_an_empty_machine_and_is_exported_from_there(
    train, custom, monkeypatch, tmp_path
):
    """In the second epoch it equals the unbroken run."""
    (tmp_path / "machine").mkdir()
    monkeypatch.chdir(tmp_path / "machine")
    url = f"file://{tmp_path}/bucket/runs"
    options = [*custom("varied"), "trainer.total_training_steps=3", "trainer.save_freq=1"]
    options += [f"trainer.default_local_dir={url}", "actor_rollout_ref.actor.checkpoint.async_save=True"]
    options += ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.ppo_epochs=2"]
    options += ["actor_rollout_ref.actor.shuffle=True", "data.train_max_samples=16"]
    options += ["actor_rollout_ref.model.activation_offload.min_bytes=0"]
    folder, unbroken = train(*options)
    assert [unbroken[step]["train/epoch"] for step in (1, 2, 3)] == [0, 0, 1]
    assert unbroken[3]["perf/offloaded_mb"] > 0 < unbroken[3]["actor/grad_norm"]
    parts = [unbroken[3][f"perf/rollout/sync_{part}_s"] for part in ("gather", "wake", "send")]
    assert 0 < sum(parts) <= unbroken[3]["timing_s/sync"]
    assert 0 < unbroken[3]["perf/rollout/running_mean"] <= unbroken[3]["perf/rollout/running_max"] <= 1024
    assert folder.is_relative_to(tmp_path / "machine/outputs")
    there = tmp_path / "bucket/runs" / folder.name
    assert {"config.yaml", "metrics.jsonl", "report.png"} <= set(os.listdir(there))
    shutil.rmtree(tmp_path / "machine/outputs")
    shutil.rmtree(there / "checkpoints/global_step_3")
    again, resumed = train(*options, "trainer.resume_mode=auto")
    assert again == folder and sorted(os.listdir(folder / "checkpoints")) == ["global_step_2", "global_step_3"]
    assert [resumed[step]["step"] for step in (1, 2, 3)] == [1, 2, 3], "the rows came back too"
    assert results(resumed[3]) == results(unbroken[3])
    assert (there / "metrics.jsonl").read_text() == (folder / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "machine/outputs")
    assert export_main([f"{url}/{folder.name}/checkpoints/global_step_3", str(tmp_path / "exported")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").num_parameters() > 0


@pytest.fixture
def judge(untrained, tmp_path):
    """A reward model in a chat template of its own: its folder, the model, its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForSequenceClassification.from_pretrained(untrained, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(untrained)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + ': ' + m.content + ';' }}{% endfor %}"
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "judge")
    return tmp_path / "judge", model, tokenizer


@pytest.mark.slow
def test_remax_with_dynamic_sampling_a_reward_model_and_an_own_loss(train, custom, judge, tmp_path):
    """In one run: greedy responses, generations until there are enough prompts, a penalty for length, a user's loss, and a
    model that reads texts in its own words and adds to the functions.
    """
    path, name = custom("mixed")
    folder, model, tokenizer = judge
    options = [
        *(path, name, path.replace("custom_reward_function", "actor_rollout_ref.actor.policy_loss")),
        *("algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=True", "data.gen_batch_size=6"),
        *("reward_model.enable=True", f"reward_model.model.path={folder}", "reward_model.rule_weight=0.5"),
        *("reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=8", "trainer.total_training_steps=2"),
        f"trainer.rollout_data_dir={tmp_path}/dumped",
    ]
    _, whole = train(*options)
    for step in (1, 2):
        generations, kept = (whole[step][f"filter_groups/{name}"] for name in ("generations", "kept_share"))
        assert generations >= 2 and 8 <= round(kept * generations * 6) <= generations * 6
        assert whole[step]["actor/own_ratio"] == pytest.approx(1, abs=0.2) and "actor/clip_fraction" not in whole[step]
        assert whole[step]["actor/loss"] == whole[step]["actor/pg_loss"], "a user's statistic takes no name of rlx's"
        assert whole[step]["train/zero_advantage_share"] == 0, "the samples of every prompt differ"
        assert whole[step]["reward/timeouts"] == whole[step]["reward/crashes"] == 0 < whole[step]["actor/grad_norm"]
        assert whole[step]["memory/reward_after_gb"] > 0

        records = [json.loads(line) for line in (tmp_path / f"dumped/{step}.jsonl").read_text().splitlines()]
        assert len(records) == 32
        for record in records[:5]:
            question = record["prompt"].removeprefix("<|user|>").removesuffix("<|assistant|>")
            ids = tokenizer(f"u: {question};a: {record['response']};", return_tensors="pt", add_special_tokens=False)
            with torch.no_grad():
                assert record["model_score"] == pytest.approx(model(**ids).logits.item(), abs=1e-4)
            assert record["score"] == pytest.approx(record["model_score"] + 0.5 * record["rule_score"])
        rule = [record["rule_score"] for record in records]
        assert whole[step]["reward/accuracy"] == sum(rule) / 32, "the functions' alone"
        mean = sum(record["score"] for record in records) / 32
        assert whole[step]["reward/mean"] < mean, "long responses lose some of their score"


def words_of(process):
    """The command line of a process, empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_worker_that_dies_is_the_last_line_and_nothing_is_left(
    short_run, ray_session, custom, capfd, monkeypatch, tmp_path
):
    """In the second step; the first one has equal rewards, and the sampler's log-probs in place of a pass."""
    monkeypatch.setattr("rlx.trainer.run.LONG_START_S", 0.0)
    options = ["algorithm.rollout_correction.bypass_mode=True", "trainer.logger=[console,jsonl]"]
    assert main([*short_run, *custom("kills_a_worker"), *options, "trainer.total_training_steps=3"]) == 1
    printed, errors = capfd.readouterr()
    assert re.search(r"^ready: device in \d+\.\d s, actor in \d+\.\d s, rollout in \d+\.\d s$", printed, re.MULTILINE)
    assert re.fullmatch(r"rank 0 .*actor.update: .*died.*", errors.strip().splitlines()[-1])
    assert "Traceback" not in errors
    left = [words_of(process) for process in psutil.Process().children(recursive=True)]
    assert not [words for words in left if "ray::WorkerProcess" in words]
    (folder,) = (tmp_path / "runs").iterdir()
    (step,) = metrics_of(folder).values()
    assert "timing_s/old_log_prob" not in step
    assert 0 < step["mismatch/mean_abs_log_prob"] < 1e-4 < step["actor/entropy"]
    assert not [name for name in step if name.startswith("actor/mismatch")]
    assert step["train/zero_advantage_share"] == 1.0 and step["reward/mean"] == 0.5 == step["reward/extra/seen"] / 2
    assert step["advantages/abs_mean"] == step["train/skipped_steps"] == 0
    assert torch.isfinite(torch.tensor([value for value in step.values() if isinstance(value, float)])).all()


@pytest.mark.slow
def test_sigterm_saves_in_time_but_ends_no_finished_run_which_a_later_validation_leaves_alone(
    short_run, ray_session, custom, monkeypatch, capfd, tmp_path
):
    monkeypatch.chdir(tmp_path)
    options = [*short_run, *custom("asks_to_end"), f"trainer.default_local_dir=file://{tmp_path}/bucket"]
    options += ["trainer.test_freq=1", "trainer.resume_mode=auto", "trainer.logger=[console,jsonl]"]
    options += ["trainer.total_training_steps=2", "trainer.save_on_sigterm_s"]
    for seconds, code, saved in (
        (0.001, 143, []),
        (300, 143, ["global_step_1"]),
        (300, 0, ["global_step_1", "global_step_2"]),
    ):
        (tmp_path / "asked").unlink(missing_ok=True)
        assert main([*options[:-1], f"{options[-1]}={seconds}"]) == code and (tmp_path / "asked").exists()
        assert ("summary" in capfd.readouterr().out) == (code == 0)
        for place in (tmp_path / "outputs", tmp_path / "bucket"):
            assert sorted(each.parent.name for each in place.rglob("global_step_*/manifest.json")) == saved
    (folder,) = (each.parent for each in (tmp_path / "outputs").rglob("report.png"))
    assert [*metrics_of(folder)] == [1, 2]
    own = {file: file.read_bytes() for file in folder.rglob("*.jsonl")}
    assert main([*options[:-1], "trainer.val_only=True", "data.val_max_samples=4"]) == 0
    assert own == {file: file.read_bytes() for file in own}
    assert len((folder / "validation/2.val_only.jsonl").read_text().splitlines()) == 4


@pytest.fixture
def mixture(untrained, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(untrained)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # else the weights would follow from the tests before
        model = Qwen3MoeForCausalLM(config)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "mixture")
    return str(tmp_path / "mixture")


@pytest.mark.slow
def test_replayed_experts_travel_to_the_updates_of_two_processes_and_their_load_is_balanced(train, mixture):
    options = [
        f"actor_rollout_ref.model.path={mixture}",
        "actor_rollout_ref.rollout.dtype=bf16",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        "actor_rollout_ref.actor.router_aux_loss_coef=0.1",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
    ]
    _, steps = train(*options)
    for step in (steps[1], steps[2]):
        assert step["mismatch/differing_experts"] > 0 == step["mismatch/differing_experts_used"]
        assert step["actor/router_aux_loss"] > 1 and step["actor/grad_norm"] > 0
