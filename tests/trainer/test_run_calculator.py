"""The tiny model learns to call the calculator."""

import json
import subprocess
import sys

import pytest

from rlx.trainer.tracking import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_held_out_accuracy_rises_because_calls_pay(tmp_path):
    """A fifth of the wrong answers become right in ten steps; how much the warm start calls differs between processors."""
    settings = [f"trainer.default_local_dir={tmp_path}", f"warm_start.cache_dir={tmp_path}/cache"]
    settings += ["trainer.total_training_steps=10", "trainer.test_freq=10"]
    done = subprocess.run(
        [sys.executable, "-m", "rlx.main_ppo", "experiment=calculator", *settings],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("*/metrics.jsonl")
    metrics = read_metrics(path)
    assert 1 - metrics[10]["val/accuracy"] <= 0.8 * (1 - metrics[0]["val/accuracy"])
    assert metrics[10]["conversation/tool_calls"] > metrics[1]["conversation/tool_calls"] + 0.2
    rows = [json.loads(line) for line in (path.parent / "transcripts" / "step_000010.jsonl").read_text().splitlines()]
    assert any(turn["calls"] for row in rows for turn in row["turns"])
