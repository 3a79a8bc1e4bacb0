"""docs/planning.md says of runs what the code predicts, and that it is close to what was measured; docs/out_of_memory.md too."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlx.config.check.validate import check
from rlx.config.compose.command_line import compose
from rlx.config.forecast.forecast_text import PARTS, long_text, short_text
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Machine
from rlx.driver import main
from rlx.offload.plan.shapes import SHAPES

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "planning.md").read_text()
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))


def on_eight(gpus: int, folder: Path) -> tuple[MemoryForecast, list[str]]:
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    machine = Machine(gpus, 64, frozenset(), vllm="0.26.0", device_bytes=80 * 10**9, host_bytes=2 * 10**12)
    composed = compose(["experiment=gsm8k_grpo_8gpu", f"{MODEL}.path={folder}", f"trainer.n_gpus_per_node={gpus}"])
    faults = [str(fault) for fault in check(composed, machine).faults if "memory" in fault.what]
    return MemoryForecast.of(composed.partial, machine), faults


def test_the_table_is_what_a_run_prints(tmp_path: Path):
    forecast, faults = on_eight(8, tmp_path)
    assert faults == []
    assert f"```text\n{short_text(forecast)}\n```" in PAGE


def test_the_refusal_is_what_two_gpus_get(tmp_path: Path):
    _, (fault,) = on_eight(2, tmp_path)
    assert f"```text\n{fault}\n```" in PAGE


def test_every_column_of_a_check_is_explained(tmp_path: Path):
    forecast, _ = on_eight(8, tmp_path)
    heads = [line for line in long_text(forecast).splitlines() if " in GB " in line]
    explained = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for name in re.findall("`([^`]+)`", row)}
    columns = [column for head in heads for column in re.split("  +", head)[1:]]
    assert len(heads) == 2 and {*PARTS, *columns} <= explained
    assert all(f"{column}: " in long_text(forecast) for column in ("others", "gathered", "full beyond"))


def test_the_example_of_out_of_memory_is_what_its_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (DOCS / "out_of_memory.md").read_text()
    (command,) = re.findall(r"^rlx check (.*)$", page, re.M)
    (example,) = re.findall(r"```text\n(.*?)```", page, re.S)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What is 7 + 5?", "answer": "12"}\n' * 300)
    (tmp_path / "reward.py").write_text("def compute_score(*_, **__):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--check", *shlex.split(command.replace("Qwen/Qwen2.5-7B-Instruct", "."))]) == 2
    printed = capsys.readouterr()
    assert example == printed.err + printed.out.splitlines()[-1] + "\n"
