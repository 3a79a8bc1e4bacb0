"""The look at model folders before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine, named_machine
from rlx.driver import main
from rlx.trainer.try_inputs import INDEX, WHOLE, check_models

KEY = "actor_rollout_ref.model.path"
HERE = Machine(gpus=0, cpus=4, packages=frozenset())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two files of weights."""
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text('{"model_type": "qwen2"}')
    for name in "ab":
        save_file({name: numpy.zeros(100, dtype=numpy.float32)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in "ab"}}))
    return tmp_path


def faults(folder: Path, *overrides: str, machine: Machine = HERE):
    composed = compose([f"{KEY}={folder}", *overrides])
    return check_models(composed.partial, composed.broken, machine)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


BROKEN = {
    "config torn": (lambda f: (f / "config.json").write_text("{"), "config.json: is not valid JSON (Expecting"),
    "config of lists": (lambda f: (f / "config.json").write_text("[]"), "config.json: got a JSON list"),
    "settings of generation": (
        lambda f: (f / "generation_config.json").write_bytes(b"\xff"),
        "generation_config.json: ",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), f"{KEY}="),
    "cut": (lambda f: cut(f / "b.safetensors"), "b.safetensors, 471 bytes: "),
    "empty": (lambda f: (f / "b.safetensors").write_bytes(b""), "b.safetensors, 0 bytes: "),
    "no header": (lambda f: (f / "b.safetensors").write_bytes(b"\xff" * 100), "b.safetensors, 100 bytes: "),
    "missing": (lambda f: (f / "b.safetensors").unlink(), "b.safetensors: "),
    "single file cut": (lambda f: (f / WHOLE).write_bytes(b"version https://git-lfs"), f"{WHOLE}, 23 bytes: "),
    "index torn": (lambda f: (f / INDEX).write_text("{"), f"{INDEX}: JSONDecodeError: "),
    "index of lists": (lambda f: (f / INDEX).write_text('{"weight_map": []}'), f"{INDEX}: AttributeError: "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_broken_file_is_one_fault_with_its_name(folder, case):
    assert faults(folder) == ()
    harm, got = BROKEN[case]
    harm(folder)
    [fault] = faults(folder)
    assert got in fault.got and str(folder) in fault.got and fault.keys == (KEY,)
    assert "save the tokenizer" in fault.remedy or f"or correct {KEY}" in fault.remedy


def test_a_folder_that_two_roles_share_is_judged_once(folder):
    cut(folder / "a.safetensors")
    assert len(faults(folder, "algorithm.adv_estimator=gae", f"critic.model.path={folder}")) == 1
    (folder / "tokenizer.json").unlink()
    judge = ("reward_model.enable=True", f"reward_model.model.path={folder}")
    assert [fault.what for fault in faults("builtin:tiny", *judge)] == ["the model's weights cannot be read"]


def test_a_plan_for_another_machine_needs_the_config_alone(folder):
    cut(folder / "a.safetensors")
    (folder / "tokenizer.json").unlink()
    assert len(faults(folder)) == 2
    assert faults(folder, machine=named_machine("8xh100")) == ()


def test_a_folder_without_weights_serves_to_plan(folder):
    for name in ("tokenizer.json", INDEX, "a.safetensors", "b.safetensors"):
        (folder / name).unlink()
    assert faults(folder) == ()


def test_hub_names_and_the_built_in_model_are_not_judged():
    assert faults("org/name") == faults("builtin:tiny") == ()


@pytest.fixture
def model(tmp_path, untrained) -> Path:
    """A folder of the built-in model that a test may change."""
    return Path(shutil.copytree(untrained, tmp_path / "model"))


def change(folder: Path, file: str = "config.json", **values: Any) -> None:
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


def head_of_its_own(folder: Path) -> None:
    weights = load_file(folder / WHOLE)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, folder / WHOLE, {"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda f: None, ""),
        (lambda f: change(f, hidden_act="__import__"), "hidden_act in config.json: got '__import__'"),
        (lambda f: change(f, model_type="no_such_model"), "model type `no_such_model`"),
        (head_of_its_own, "set override_config.tie_word_embeddings=False"),
        (lambda f: change(f, "tokenizer_config.json", eos_token=None), "it has no EOS token"),
        (lambda f: change(f, vocab_size=200), "expected ids below 200, the number of rows of the model's embedding"),
        (lambda f: change(f, vocab_size=1), "the EOS token '</s>' has id 1, expected an id below 1"),
    ],
)
def test_the_check_finds_what_would_end_the_run_at_its_start(model, tmp_path, capsys, harm, told):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    files = [f"data.{split}_files={tmp_path}/rows.jsonl" for split in ("train", "val")]
    command = ["--check", f"{KEY}={model}", *files, "data.answer_key=answer", "actor_rollout_ref.rollout.name=hf"]
    command += ["trainer.device=cpu", f"custom_reward_function.path={tmp_path}/reward.py"]
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1.0")
    harm(model)
    assert main(command) == (2 if told else 0)
    assert told in " ".join(capsys.readouterr().err.split())


JUDGE = ("reward_model.enable=True", "reward_model.model.path=org/judge", "reward_model.rule_weight=0.5")


@pytest.mark.parametrize(
    ("path", "judge"), [("builtin:tiny", ()), ("builtin:tiny", JUDGE), ("org/of-the-hub", ()), (None, ())]
)
def test_the_check_tries_every_answer_with_the_reward(model, tmp_path, capsys, path, judge):
    """For a folder of a model, the built-in one, and one of the hub, also as the reward model; row 1 alone would not show it."""
    truths = [*("1", "2") * 600, "N/A", ["6"], ""]
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1"}]}
    rows = [row | {"reward_model": {"style": "rule", "ground_truth": truth}} for truth in truths]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    command = ["--check", f"{KEY}={path or model}", f"data.train_files={tmp_path}/rows.jsonl", "trainer.device=cpu"]
    command += ["actor_rollout_ref.rollout.name=hf", "trainer.val_before_train=False", "trainer.test_freq=-1", *judge]
    assert main(command) == 2
    told = " ".join(capsys.readouterr().err.split())
    for line, truth in zip((1201, 1202, 1203), truths[-3:], strict=True):
        assert f"line {line}: the answer cannot be scored: raised ValueError: ground_truth is {truth!r}" in told
    assert main([*command, "reward.on_error=zero"]) == 0, capsys.readouterr().err
    if path == "org/of-the-hub":  # the rows that are left are known with its tokenizer alone
        assert main([*command, "data.filter_overlong_prompts=True"]) == 0, capsys.readouterr().err
