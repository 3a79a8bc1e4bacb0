"""docs/start.md: its data and reward work, its commands can be given."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.cli import COMMANDS
from rlx.config.check.validate import check
from rlx.config.choices import PROMPTS, chosen
from rlx.config.compose.command_line import compose
from rlx.config.machine import named_machine
from rlx.config.schema import DataConfig
from rlx.data.prompts import PromptDataset
from rlx.models.tiny import make_tiny_tokenizer
from rlx.trainer.try_inputs import training_rows

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/start.md").read_text()
(ROWS,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
(REWARD,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS_OF_PAGE = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
MODEL = "actor_rollout_ref.model.path"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.jsonl").write_text(ROWS * 8)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def test_the_rows_and_the_reward_fit_each_other(folder: Path):
    data = PromptDataset([str(folder / "mine.jsonl")], DataConfig(answer_key="answer"), make_tiny_tokenizer(), "train")
    info = data.batch([0, 1]).info
    space: dict = {}
    exec(REWARD, space)
    scores = [
        [
            space["compute_score"](info["data_source"][row], text, info["ground_truth"][row])
            for text in ("It is 12.", "")
        ]
        for row in (0, 1)
    ]
    assert scores == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("command", COMMANDS_OF_PAGE, ids=lambda command: " ".join(command.split()[:3]))
def test_a_command_can_be_given(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    match shlex.split(command):
        case "rlx", name, *words:
            assert name in COMMANDS
            machine = named_machine("1xrtx4090")
            overrides = [word for word in words if "=" in word]
            composed = compose(overrides)
            overrides += chosen(overrides, composed, machine, training_rows(composed.partial, PROMPTS))
            assert check(compose(overrides), machine).faults == ()
        case other:
            pytest.fail(f"no test of {other}")


@pytest.mark.slow
@pytest.mark.e2e
def test_the_command_without_a_gpu_trains_own_data_and_reward(folder: Path, untrained: str):
    (command,) = (line for line in COMMANDS_OF_PAGE if "rollout.name=hf" in line)
    words = shlex.split(command.replace("MODEL", untrained))[2:]
    short = ["trainer.total_training_steps=1", "trainer.device=cpu", "data.max_response_length=8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "rlx.cli", "train", *words, *short]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "trainer.n_gpus_per_node=1" in done.stdout and "1/1" in done.stdout
    (run,) = folder.glob("outputs/rlx/*/*")
    assert f"run {run}\n" in done.stdout.partition("1/1")[0], "the folder is known while the run lasts"
    assert len([*folder.glob("outputs/**/global_step_1/manifest.json")]) == 1
