"""Runs that cannot fit are refused before they start, with keys that make them fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlx.config.check.rules_memory import REFUSED_FROM
from rlx.config.check.validate import Verdict, check
from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine
from rlx.offload.plan.shapes import SHAPES

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
UNFIT, HOST = "the run does not fit into device memory", "states and activations do not fit into host memory"
DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu")
BF16 = f"{ACTOR}.fsdp_config.model_dtype=bf16"
GRPO = "algorithm.adv_estimator=grpo"

Predict = Callable[..., Verdict]


@pytest.fixture
def predict(tmp_path: Path) -> Predict:
    """The verdict on a run of Qwen2-7B's shape on GPUs of 80 GB."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))

    def of(*overrides: str, gpus: int = 1, host_gb: float = 1000, device_gb: float = 80) -> Verdict:
        machine = Machine(
            gpus,
            16,
            frozenset({"peft"}),
            vllm="0.26.0",
            device_bytes=int(device_gb * 1e9),
            host_bytes=int(host_gb * 1e9),
        )
        given = [f"{MODEL}.path={tmp_path}", f"trainer.n_gpus_per_node={gpus}", f"{ROLLOUT}.n=4"]
        if not any(DYNAMIC[0] in override for override in overrides):
            given.append(f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
        return check(compose([*given, *overrides]), machine)

    return of


def changes(remedy: str) -> list[str]:
    """The keys that a remedy sets together, or the first of several of which one is enough."""
    first = remedy.split(", or ")[0].split(";")[0]
    return re.findall(r"[\w.]+=[\w.]+", first)


def about_memory(verdict: Verdict) -> list[str]:
    return [warning for warning in verdict.warnings if "memory may run out" in warning]


REFUSED = {
    "a 7B in fp32 with a critic": [],
    "a 7B in fp32": [GRPO],
    "long sequences in bf16": [GRPO, BF16, DYNAMIC[0], f"{DYNAMIC[1]}=65536"],
    "long ones in truth": [GRPO, BF16, DYNAMIC[0], f"{DYNAMIC[1]}=70000", "data.max_response_length=65536"],
    "without checkpointing": [
        *(GRPO, BF16, f"{MODEL}.enable_gradient_checkpointing=False", "data.max_response_length=16000"),
        f"{ACTOR}.fsdp_config.optimizer_offload=True",
    ],
    "vllm awake": [GRPO, BF16, f"{ROLLOUT}.free_cache_engine=False", f"{ROLLOUT}.gpu_memory_utilization=0.7"],
    "too much for vllm": [GRPO, BF16, f"{ROLLOUT}.gpu_memory_utilization=0.9"],
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_fit_is_refused_and_accepted_after_the_remedy(predict: Predict, options: list[str]):
    (fault,) = predict(*options).faults
    assert fault.what == UNFIT
    assert re.match(r"\w+ [\d.]+ GB \(\w+ [\d.]+", fault.got)
    assert "of a device's 80.0 GB; a run that needs over 10 % more is rejected" in fault.expected
    assert fault.remedy.endswith("; trainer.memory_check=warn runs anyway")
    named = changes(fault.remedy)
    assert named
    assert predict(*options, *named).faults == ()


def test_a_share_too_small_for_a_sequence_is_raised(predict: Predict):
    options = (GRPO, BF16, f"{MODEL}.lora_rank=16")
    (fault,) = predict(*options, device_gb=24).faults
    assert "the sampler's share lacks 3.3" in fault.got and " GB to hold one sequence" in fault.got
    named = changes(fault.remedy)
    assert f"{ROLLOUT}.gpu_memory_utilization=0.8" in named
    assert predict(*options, *named, device_gb=24).faults == ()
    # Where the usual share is too small as well, it is the least that holds one sequence.
    (alone,) = predict(*options, f"{ACTOR}.fsdp_config.param_offload=True", device_gb=18).faults
    assert changes(alone.remedy) == [f"{ROLLOUT}.gpu_memory_utilization=0.86"]
    assert (
        predict(*options, f"{ACTOR}.fsdp_config.param_offload=True", *changes(alone.remedy), device_gb=18).faults == ()
    )


def test_what_moves_between_phases_comes_before_what_streams_in_each_micro_batch(predict: Predict):
    (fault,) = predict(GRPO, f"{MODEL}.lora_rank=16", device_gb=24).faults
    param_offload = f"{ACTOR}.fsdp_config.param_offload=True"
    assert changes(fault.remedy) == [BF16, param_offload, f"{ROLLOUT}.gpu_memory_utilization=0.8"]


def test_where_nothing_is_enough_that_is_said(predict: Predict):
    (fault,) = predict(GRPO, device_gb=20).faults
    assert "are not enough: use more processes (trainer.n_gpus_per_node)" in fault.remedy


def test_a_single_change_that_is_not_enough_is_one(predict: Predict):
    cpu = ("trainer.device=cpu", f"{ROLLOUT}.name=hf", f"{ROLLOUT}.max_num_seqs=1")
    remedies = [fault.remedy for fault in predict(GRPO, *cpu, host_gb=20).faults if "enough" in fault.remedy]
    assert remedies and all(f"{MODEL}.tiled_mlp=auto is not enough: use" in remedy for remedy in remedies), remedies


def test_frozen_layers_that_stream_make_room(predict: Predict):
    options = (GRPO, BF16, f"{MODEL}.lora_rank=16", f"{MODEL}.enable_activation_offload=True", f"{ROLLOUT}.name=hf")
    (fault,) = predict(*options, device_gb=30).faults
    assert f"{MODEL}.layer_offload=True" in fault.remedy
    assert UNFIT not in [each.what for each in predict(*options, f"{MODEL}.layer_offload=True", device_gb=30).faults]


def test_warnings_come_below_the_margin(predict: Predict):
    # Weights, gradients and states in bf16, once more the weights that FSDP gathers for one process, and the head at work.
    (fault,) = predict(GRPO, BF16, f"{ROLLOUT}.gpu_memory_utilization=0.25", device_gb=40).faults
    needed_gb = max(float(peak) for peak in re.findall(r"update_actor (\d+\.\d+) GB", fault.got))
    assert needed_gb > 8 * 7.6156
    for gb, faults, warnings in (
        (needed_gb / 0.94 / REFUSED_FROM * 0.99, 1, 0),
        (needed_gb / 0.94 / REFUSED_FROM * 1.01, 0, 1),
        (needed_gb / 0.94 * 0.99, 0, 1),
        (needed_gb / 0.94 * 1.01, 0, 0),
    ):
        verdict = predict(GRPO, BF16, f"{ROLLOUT}.gpu_memory_utilization=0.25", device_gb=gb)
        assert (len(verdict.faults), len(about_memory(verdict))) == (faults, warnings)


def test_samples_that_may_be_long_are_warned_of_and_not_refused(predict: Predict):
    rows = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", "data.max_response_length=3000")
    verdict = predict(GRPO, *rows, gpus=8)
    assert verdict.faults == ()
    (warning,) = about_memory(verdict)
    assert warning.startswith("device memory may run out: update_actor ")
    assert "sequences of 3,512 tokens" in warning
    assert re.search(rf"to be safe: set {ACTOR}.ppo_micro_batch_size_per_gpu=\d\d$", warning)
    assert re.search(r"; sequences of up to [\d,]+ tokens fit", warning)
    padded = predict(GRPO, *rows, f"{MODEL}.use_remove_padding=False", gpus=8)
    assert [fault.what for fault in padded.faults] == [UNFIT]


def test_so_are_many_samples_at_once_of_transformers(predict: Predict):
    many = (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.max_num_seqs=128", "data.max_response_length=8192")
    verdict = predict(GRPO, BF16, *many, f"{ACTOR}.fsdp_config.optimizer_offload=True", device_gb=84)
    assert verdict.faults == ()
    (warning,) = about_memory(verdict)
    assert warning.startswith("device memory may run out: rollout ")
    (number,) = re.findall(rf"{ROLLOUT}.max_num_seqs=(\d+)", warning)
    assert 32 < int(number) < 128


def test_the_key_says_whether_to_refuse_warn_or_predict_nothing(predict: Predict):
    warned = predict(GRPO, "trainer.memory_check=warn")
    assert warned.faults == ()
    (warning,) = about_memory(warned)
    assert "optimizer_offload=True" in warning
    off = predict(GRPO, "trainer.memory_check=off")
    assert off.faults == () and about_memory(off) == []


def test_what_waits_on_the_host_must_fit_there(predict: Predict):
    offload = f"{ACTOR}.fsdp_config.optimizer_offload=True"
    (fault,) = predict(GRPO, offload, gpus=8, host_gb=40).faults
    assert fault.what == HOST
    assert re.search(r"[\d.]+ GB in 8 process\(es\), in \w+", fault.got)
    assert "at most the 40.0 GB of this machine" in fault.expected
    assert fault.remedy.startswith(f"set {ACTOR}.fsdp_config.optimizer_offload=False")
    assert predict(GRPO, *changes(fault.remedy), gpus=8, host_gb=40).faults == ()
    verdict = predict(GRPO, offload, gpus=8, host_gb=58)
    assert verdict.faults == ()
    (warning,) = about_memory(verdict)
    assert warning.startswith("host memory may run out: ")


def test_device_and_host_are_faults_of_their_own(predict: Predict):
    faults = predict(f"{ACTOR}.fsdp_config.optimizer_offload=True", host_gb=20).faults
    assert [fault.what for fault in faults] == [UNFIT, HOST]


def test_without_an_accelerator_the_hosts_memory_counts(predict: Predict):
    (fault,) = predict("trainer.device=cpu", f"{ROLLOUT}.name=hf", host_gb=60).faults
    assert fault.what == "the run does not fit into host memory"
    assert "of each process's part of the host's 60.0" in fault.expected
    assert predict("trainer.device=cpu", f"{ROLLOUT}.name=hf", host_gb=1000).faults == ()


@pytest.mark.parametrize("content", [None, '{"model_type": "gpt2", "n_embd": 8}', "{", "[]", '{"model_type": "llama"}'])
def test_an_unknown_architecture_is_never_refused(predict: Predict, tmp_path: Path, content: str | None):
    other = tmp_path / "other"
    other.mkdir()
    if content is not None:
        (other / "config.json").write_text(content)
    verdict = predict(f"{MODEL}.path={other}", device_gb=0.1, host_gb=0.1)
    assert not any("memory" in fault.what for fault in verdict.faults)
    assert about_memory(verdict) == []


def test_beside_a_value_that_cannot_be_read_nothing_is_predicted(predict: Predict):
    faults = predict(f"{ACTOR}.fsdp_config.model_dtype=fp12").faults
    assert UNFIT not in [fault.what for fault in faults] and faults
