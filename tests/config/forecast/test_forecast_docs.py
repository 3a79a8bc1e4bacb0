"""docs/planning.md explains what a check prints, and docs/out_of_memory.md shows it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlx.config.compose.command_line import compose
from rlx.config.forecast.forecast_text import PARTS, long_text
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Machine
from rlx.driver import main
from rlx.offload.plan.shapes import SHAPES

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "planning.md").read_text()
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))


def on_eight(folder: Path) -> MemoryForecast:
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    machine = Machine(8, 64, frozenset(), vllm="0.26.0", device_bytes=80 * 10**9, host_bytes=2 * 10**12)
    return MemoryForecast.of(compose(["experiment=gsm8k_grpo_8gpu", f"{MODEL}.path={folder}"]).config, machine)


def test_every_column_of_a_check_is_explained(tmp_path: Path):
    forecast = on_eight(tmp_path)
    heads = [line for line in long_text(forecast).splitlines() if " in GB " in line]
    explained = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for name in re.findall("`([^`]+)`", row)}
    columns = [column for head in heads for column in re.split("  +", head)[1:]]
    assert len(heads) == 2 and {*PARTS, *columns} <= explained
    assert all(f"{column}: " in long_text(forecast) for column in ("others", "gathered", "full beyond"))


def test_the_command_of_out_of_memory_is_rejected_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    page = (DOCS / "out_of_memory.md").read_text()
    (command,) = re.findall(r"^rlx check (.*)$", page, re.M)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What is 7 + 5?", "answer": "12"}\n' * 300)
    (tmp_path / "reward.py").write_text("def compute_score(*_, **__):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--check", *shlex.split(command.replace("Qwen/Qwen2.5-7B-Instruct", "."))]) == 2
    assert "1. the run does not fit into" in capsys.readouterr().err
