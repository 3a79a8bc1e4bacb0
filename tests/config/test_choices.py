"""The model and the data alone make a run: what the command leaves open is chosen for the machine, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlx.config.check.validate import check
from rlx.config.choices import (
    BATCH,
    CPU_PROMPTS,
    PROMPTS,
    SAMPLES,
    SEQUENCES,
    chosen,
    not_chosen,
    why_fewer,
    with_reason,
)
from rlx.config.compose.command_line import compose
from rlx.config.faults import Fault
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Cluster, Machine
from rlx.driver import main
from rlx.trainer.try_inputs import training_rows

SMALL = {
    "model_type": "qwen2",
    **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    **{"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True},
}
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
MODEL, TOKENS = "actor_rollout_ref.model.path", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def machine(gpus: int, gb: int) -> Machine:
    sizes = {"device_bytes": gb * 10**9 if gpus else None, "host_bytes": 128 * 10**9}
    return Machine(gpus=gpus, cpus=16, packages=frozenset(), vllm="0.26.0", **sizes)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b", "data_source": "math"}\n' * 200)
    return [f"{MODEL}={tmp_path}", f"data.train_files={tmp_path}/rows.jsonl", "data.answer_key=answer"]


def choices(command: list[str], of: Machine) -> dict[str, str]:
    composed = compose(command)
    return dict(text.split("=", 1) for text in chosen(command, composed, of, training_rows(composed.partial, PROMPTS)))


@pytest.mark.parametrize(("gpus", "processes"), [(1, "1"), (4, "4"), (0, "1")])
def test_model_and_data_alone_give_a_run_without_faults(command, gpus, processes):
    found = choices(command, machine(gpus, 24))
    assert found["trainer.n_gpus_per_node"] == processes
    assert found["algorithm.adv_estimator"] == "grpo" and int(found["actor_rollout_ref.rollout.n"]) > 1
    whole = compose([*command, *(f"{key}={value}" for key, value in found.items())])
    assert check(whole, machine(gpus, 24)).faults == ()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator"),
        (["algorithm.adv_estimator=grpo", "data.train_batch_size=50"], "algorithm.adv_estimator"),
        (["critic.optim.lr=1e-5"], "critic.optim.lr"),
        ([], None),
        (["algorithm.adv_estimator=grpo", "experiment=gsm8k_grpo_1gpu"], None),
    ],
)
def test_a_fault_of_a_size_that_rlx_did_not_choose_says_why(command, keys: list[str], named: str | None):
    given = [*command, *keys]
    unchosen = not_chosen(given, compose(given))
    for key in (SAMPLES, "data.train_batch_size", MINI):
        fault = Fault("too large", f"{key}=1024", "less", "lower it", (key,))
        is_open = named is not None and f"{key}=50" not in keys
        reason = f"; rlx chooses {key} only for a command without {named}" if is_open else ""
        assert with_reason(fault, unchosen) == replace(fault, got=f"{key}=1024{reason}")


def test_a_check_says_why_grpo_has_one_sample_and_the_batch_its_default(command, tmp_path: Path, capsys):
    assert main(["--on", "1xrtx4090", *command, "algorithm.adv_estimator=grpo"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for key, value in ((SAMPLES, f"algorithm.adv_estimator=grpo, {SAMPLES}=1"), (BATCH, "1024 with 200 prompts")):
        assert f"{value}; rlx chooses {key} only for a command without algorithm.adv_estimator" in said


def test_micro_batches_are_the_largest_that_fit_the_forecast(command):
    long = [*command, "data.max_response_length=8192", "actor_rollout_ref.model.enable_gradient_checkpointing=False"]
    tokens = [int(choices(long, machine(1, gb))[TOKENS]) for gb in (24, 80, 141)]
    assert tokens == sorted(tokens) and tokens[0] < tokens[-1]
    assert tokens[0] >= 8192 + 512, "a row fits"


HF = "actor_rollout_ref.rollout.name=hf"
SMOL = {
    **{**SMALL, "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
}


@pytest.mark.parametrize(("gb", "response"), [(8, 512), (16, 4096), (24, 512), (128, 128)])
def test_on_a_cpu_the_sizes_leave_half_of_the_memory_and_micro_batches_do_not_shrink_for_the_sampler(
    command, tmp_path: Path, gb: int, response: int
):
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    host = replace(machine(0, 0), host_bytes=gb * 10**9)
    given = [*command, HF, f"data.max_response_length={response}"]
    found = choices(given, host)
    whole = compose([*given, *(f"{key}={value}" for key, value in found.items())])
    assert whole.config.data.train_batch_size == CPU_PROMPTS
    phases = {phase.name: phase for phase in MemoryForecast.of(whole.config, host).phases()}
    assert gb < 16 or all(phase.peak <= gb * 10**9 / 2 for phase in phases.values())
    assert found[TOKENS] == choices([*given, f"{SEQUENCES}=1"], host)[TOKENS]


def test_sequences_are_fewer_where_the_cache_of_all_does_not_fit(command, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    host = replace(machine(0, 0), host_bytes=8 * 10**9)
    assert int(choices([*command, HF, "data.train_batch_size=128"], host)[SEQUENCES]) == 32
    assert SEQUENCES not in choices([*command, HF, "data.train_batch_size=128", f"{SEQUENCES}=512"], host)


def test_a_key_of_the_command_is_never_changed(command):
    keys = ["algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    given = [*command, *keys, "data.val_files=x.jsonl"]
    assert choices(given, machine(4, 80)) == {}


@pytest.mark.parametrize(
    ("given", "prompts", "mini"),
    [("data.train_batch_size=32", 32, 32), ("data.train_batch_size=256", 256, 64), (f"{MINI}=48", 96, 48)],
)
def test_a_size_of_the_command_keeps_grpo(command, given, prompts, mini):
    found = choices([*command, given], machine(1, 80))
    whole = compose([*command, given, *(f"{key}={value}" for key, value in found.items())])
    assert whole.config.algorithm.adv_estimator == "grpo" and whole.config.data.train_batch_size == prompts
    assert whole.config.actor_rollout_ref.actor.ppo_mini_batch_size == mini
    assert check(whole, machine(1, 80)).faults == ()


@pytest.mark.parametrize(
    ("rows", "given", "prompts", "mini"),
    [(2, "", 2, 2), (100, "", 100, 100), (64, "", 64, 64), (100, f"{MINI}=64", 64, 64), (100, f"{MINI}=30", 90, 30)],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_batch_is_no_larger_than_the_data(command, tmp_path, rows, given, prompts, mini, kind):
    if kind == "jsonl":
        (tmp_path / "few.jsonl").write_text('{"prompt": "", "answer": ""}\n\n' * rows)
    else:
        pq.write_table(pa.table({"prompt": [""] * rows}), tmp_path / "few.parquet")
    composed = compose([*command, f"data.train_files={tmp_path}/few.{kind}", *([given] if given else [])])
    counted = training_rows(composed.partial, PROMPTS)
    more = chosen([], composed, machine(1, 80), counted)
    found = dict(text.split("=", 1) for text in more)
    assert found["data.train_batch_size"] == str(prompts)
    assert given or found[MINI] == str(mini)
    assert f"has {rows} row(s)" in why_fewer(counted, more)


def test_a_batch_is_no_larger_than_the_generated_task(command):
    generated = [command[0], "data.arithmetic.train_size=32"]
    assert choices(generated, machine(1, 80))["data.train_batch_size"] == "32"


def test_many_rows_and_files_that_are_no_data_leave_the_usual_batch(command, tmp_path):
    assert choices(command, machine(1, 80))["data.train_batch_size"] == "128"
    assert why_fewer(PROMPTS, ["data.train_batch_size=128"]) == ""
    (tmp_path / "broken.parquet").write_text("no parquet")
    for file in ("broken.parquet", "none.jsonl", "data.csv"):
        broken = [*command, f"data.train_files={tmp_path}/{file}"]
        assert choices(broken, machine(1, 80))["data.train_batch_size"] == "128"


def test_a_head_without_gpus_takes_no_process_from_the_others(command):
    cluster = replace(machine(8, 80), cluster=Cluster("ray://head", (0, 8, 8)))
    assert choices(command, cluster)["trainer.n_gpus_per_node"] == "8"


def test_an_experiment_or_the_default_run_is_left_alone(command):
    for given in (["experiment=arithmetic", *command], ["data.answer_key=answer"]):
        assert choices(given, machine(4, 80)) == {}
