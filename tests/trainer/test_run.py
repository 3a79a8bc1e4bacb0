"""Whole runs: what must not change a result, what must survive a stop, what must be refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from metrics_page import described
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlx.checkpoint import manifest
from rlx.driver import main
from rlx.export import main as export_main
from rlx.rewards.manager import RewardError
from rlx.trainer.checkpoints import ResumeError

pytestmark = pytest.mark.e2e

REWARDS = """
import os, signal, psutil

def varied(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 16

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "seen": 1.0}

def broken(data_source, solution_str, ground_truth, extra_info=None):
    return float("nan")

def mixed(data_source, solution_str, ground_truth, extra_info=None):
    return float(any(letter in solution_str for letter in "abcdefghijk"))

def policy_loss(log_probs, old_log_probs, advantages, mask, settings):
    ratio = (log_probs - old_log_probs).exp()
    return -advantages * ratio, {"own_ratio": ratio, "loss": ratio}

def kills_a_worker(data_source, solution_str, ground_truth, extra_info=None):
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


# Numbers of a step that say what was computed, not how long it took or what it took.
MACHINE = ("timing_s/", "perf/", "memory/", "time")


def results(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MACHINE)}


def four_steps(*overrides: str) -> list[str]:
    return ["trainer.total_training_steps=4", "trainer.save_freq=2", *overrides]


def resume_from(folder, step: int) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_{step}"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(train, custom):
    """That offloading changes no number is held by the next test, whose resumed part goes on without."""
    options = four_steps(
        *custom("varied"),
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True",
        "data.train_max_samples=16",
    )
    folder, with_offload = train(*options, "actor_rollout_ref.model.activation_offload.min_bytes=0")
    assert [with_offload[step]["train/epoch"] for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert with_offload[4]["perf/offloaded_mb"] > 0
    assert with_offload[4]["actor/grad_norm"] > 0
    parts = [with_offload[4][f"perf/rollout/sync_{part}_s"] for part in ("gather", "wake", "send")]
    assert 0 < sum(parts) <= with_offload[4]["timing_s/sync"]
    assert 0 < with_offload[4]["perf/rollout/running_mean"] <= with_offload[4]["perf/rollout/running_max"] <= 1024

    again, resumed = train(*options, *resume_from(folder, 2), "actor_rollout_ref.model.activation_offload.min_bytes=0")
    assert again == folder
    for step in (3, 4):
        assert results(resumed[step]) == results(with_offload[step])


@pytest.mark.slow
def test_ppo_on_two_processes_resumes_and_its_critic_offloads(train, custom, capfd, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = four_steps(
        *custom("varied"),
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "trainer.n_gpus_per_node=2",
        "trainer.critic_warmup=1",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.model.activation_offload.save=attention",
        "critic.model.activation_offload.min_bytes=0",
        "critic.model.activation_offload.tier=disk",
        "critic.ulysses_sequence_parallel_size=2",
        f"critic.model.activation_offload.directory={disk}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        "trainer.max_actor_ckpt_to_keep=2",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=[token_k1,seq_max_k2]",
        "algorithm.rollout_correction.rollout_rs_threshold=[0.5_2.0,0.1]",
        "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
    )
    folder, unbroken = train(*options)
    assert [name for name in unbroken[4] if "/" in name and not described(name)] == []
    assert "actor/grad_norm" not in unbroken[1], "only the critic learns in its warm-up"
    assert unbroken[2]["actor/grad_norm"] > 0 and unbroken[1]["critic/grad_norm"] > 0
    assert unbroken[4]["correction/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert unbroken[4]["correction/rejected_token_share"] == 0 < unbroken[4]["mismatch/mean_abs_log_prob"] < 1e-4
    assert unbroken[4]["actor/reward_kl_coef"] != unbroken[1]["actor/reward_kl_coef"]
    for role in ("actor", "critic"):
        assert unbroken[4][f"perf/offload/{role}/offloaded_bytes"] > 0 == unbroken[4][f"perf/offload/{role}/held_bytes"]
    assert unbroken[4]["perf/offload/critic/disk_bytes"] > 0 == unbroken[4]["perf/offload/actor/disk_bytes"]
    assert 0 < unbroken[4]["perf/stall_share"] < 1 and not list(disk.iterdir())
    # Resumed without offloading: what it changed, and what the checkpoint left out, would both show.
    no_offload = (f"{role}.model.enable_activation_offload=False" for role in ("actor_rollout_ref", "critic"))
    again, resumed = train(*options, *resume_from(folder, 2), *no_offload)
    assert again == folder
    printed = capfd.readouterr()
    assert f"resuming from step 2: {folder}" in printed.out + printed.err
    for step in (3, 4):
        assert resumed[step]["perf/offloaded_mb"] == 0
        assert results(resumed[step]) == results(unbroken[step])


@pytest.mark.slow
def test_a_run_passes_over_damaged_checkpoints_resumes_on_other_processes_and_begins_anew_without_a_whole_one(
    train, custom, capfd, monkeypatch
):
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)  # so that the workers find the damage and not the driver
    options = [*custom("varied"), "trainer.total_training_steps=4", "trainer.save_freq=1"]
    options += ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"]
    folder, unbroken = train(*options, "actor_rollout_ref.actor.checkpoint.async_save=True")
    saved = folder / "checkpoints"
    assert sorted(os.listdir(saved)) == [f"global_step_{step}" for step in (1, 2, 3, 4)]
    for step in (3, 4):
        (shard,) = (saved / f"global_step_{step}/actor/optimizer").iterdir()
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
    with pytest.raises(ResumeError, match=rf"global_step_4 cannot be used: {shard}: bytes 0 to .* have changed"):
        train(*options, *resume_from(folder, 4))
    capfd.readouterr()
    auto = [*options, "trainer.resume_mode=auto"]
    assert train(*auto, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=fsdp")[0] == folder
    printed = capfd.readouterr()
    assert all(f"passed over global_step_{step}" in printed.out + printed.err for step in (3, 4))
    assert sorted(os.listdir(saved / "superseded")) == ["global_step_3", "global_step_4"]
    assert len(os.listdir(saved / "global_step_3/actor/model")) == 2, "one file of each process"
    shutil.rmtree(saved / "global_step_4")
    _, resumed = train(*auto)
    assert len(os.listdir(saved / "global_step_4/actor/model")) == 1
    # Rounding differs between numbers of processes, so in step 4 a token may be another one.
    for step, rel in ((3, 1e-3), (4, 0.05)):
        for name in ("reward/mean", "actor/grad_norm", "actor/lr", "train/policy_version"):
            assert resumed[step][name] == pytest.approx(unbroken[step][name], rel=rel), (step, name)

    for shard in saved.glob("global_step_*/actor/optimizer/*"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    again, anew = train(*auto)
    printed = capfd.readouterr()
    assert again == folder and "passed over global_step_1" in printed.out + printed.err
    assert [results(row) for row in anew.values()] == [results(row) for row in unbroken.values()]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_run_on_a_url_resumes_from_there_on_an_empty_machine_and_is_exported_from_there(
    train, custom, monkeypatch, tmp_path
):
    (tmp_path / "machine").mkdir()
    monkeypatch.chdir(tmp_path / "machine")
    url = f"file://{tmp_path}/bucket/runs"
    options = [*custom("varied"), "trainer.total_training_steps=3", "trainer.save_freq=1"]
    options += [f"trainer.default_local_dir={url}", "actor_rollout_ref.actor.checkpoint.async_save=True"]
    folder, unbroken = train(*options)
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


def test_real_gsm8k_trains_and_the_model_leaves(train):
    source = os.environ.get("RLX_GSM8K_DIR")
    if not source:
        pytest.skip("RLX_GSM8K_DIR names no folder with GSM8K's train.jsonl and test.jsonl")
    folder, metrics = train(
        f"data.train_files={source}/train.jsonl",
        f"data.val_files={source}/test.jsonl",
        "data.max_prompt_length=512",
        "data.max_response_length=32",
        "data.filter_overlong_prompts=True",
        "data.val_max_samples=4",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "trainer.test_freq=3",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )
    assert set(metrics) == {1, 2, 3}
    assert all(torch.isfinite(torch.tensor(m["actor/loss"])) for m in metrics.values())
    assert "val/accuracy" in metrics[3]
    exported = folder / "checkpoints/global_step_3/actor/hf_model"
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0


@pytest.mark.slow
def test_equal_rewards_and_the_samplers_log_probs_give_a_reported_step_without_nan(train, custom):
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    _, metrics = train(*custom("constant"), bypass, "trainer.total_training_steps=1")
    assert "timing_s/old_log_prob" not in metrics[1]
    assert 0 < metrics[1]["mismatch/mean_abs_log_prob"] < 1e-4 < metrics[1]["actor/entropy"]
    assert not [name for name in metrics[1] if name.startswith("actor/mismatch")]
    assert metrics[1]["train/zero_advantage_share"] == 1.0
    assert metrics[1]["reward/mean"] == 0.5
    assert metrics[1]["advantages/abs_mean"] == 0.0
    assert metrics[1]["train/skipped_steps"] == 0
    assert torch.isfinite(torch.tensor([v for v in metrics[1].values() if isinstance(v, float)])).all()


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
        path,
        name,
        path.replace("custom_reward_function", "actor_rollout_ref.actor.policy_loss"),
        "algorithm.adv_estimator=remax",
        "algorithm.filter_groups.enable=True",
        "data.gen_batch_size=6",
        "reward_model.enable=True",
        f"reward_model.model.path={folder}",
        "reward_model.rule_weight=0.5",
        "reward.overlong_buffer.enable=True",
        "reward.overlong_buffer.len=8",
        "trainer.total_training_steps=2",
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


@pytest.mark.slow
def test_a_reward_that_is_no_number_names_the_sample_and_keeps_a_copy(train, custom, tmp_path):
    with pytest.raises(RewardError, match="nan"):
        train(*custom("broken"), "trainer.total_training_steps=1")
    assert list((tmp_path / "runs").glob("*/failed_rewards/*.json"))


def words_of(process):
    """The command line of a process, empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_worker_that_dies_is_the_last_line_and_nothing_is_left(short_run, ray_session, custom, capfd):
    assert main([*short_run, *custom("kills_a_worker"), "trainer.total_training_steps=2"]) == 1
    errors = capfd.readouterr().err
    assert re.fullmatch(r"rank 0 .*actor.log_probs: .*died.*", errors.strip().splitlines()[-1])
    assert "Traceback" not in errors
    left = [words_of(process) for process in psutil.Process().children(recursive=True)]
    assert not [words for words in left if "ray::WorkerProcess" in words]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_cleanly(untrained, tmp_path):
    command = [
        sys.executable,
        "-m",
        "rlx.main_ppo",
        "experiment=arithmetic",
        f"actor_rollout_ref.model.path={untrained}",
    ]
    options = [
        "trainer.total_training_steps=1000",
        "data.val_max_samples=8",
        f"trainer.default_local_dir={tmp_path}/runs",
    ]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What a shell starts in the background ignores the signal, and so would this run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not any(tmp_path.glob("runs/*/metrics.jsonl")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.5)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output, output
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, [p.cmdline() for p in alive]
