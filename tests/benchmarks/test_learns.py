"""The nightly command's table and verdict, from the metrics of runs; docs/tools.md has figures of real ones."""

import json

import pytest

from benchmarks import learns
from benchmarks.learning import Curve, read


def metrics(folder, accuracies, rewards):
    """Write the metrics of a finished run."""
    folder.mkdir(parents=True)
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    rows += [{"step": 100 + 20 * place, "val/accuracy": value} for place, value in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


RISING = [0.3] * 5 + [0.5] * 5


@pytest.mark.parametrize(
    ("task", "accuracies", "rewards", "fault"),
    [
        ("calculator-grpo", [0.1, 0.29], RISING, "TOO FEW points, below 20"),
        ("arithmetic-grpo", [0.55, 0.7], RISING, "TOO GOOD before, 55% or more"),
        ("arithmetic-ppo", [0.45, 0.7], [0.3] * 5 + [0.37] * 5, r"TOO LITTLE reward, below +0.08"),
    ],
)
def test_each_shortfall_is_a_fault(tmp_path, task, accuracies, rewards, fault):
    metrics(tmp_path / "run", accuracies, rewards)
    assert learns.faults(learns.TASKS[task], read(tmp_path / "run")) == [fault]
    assert learns.faults(learns.TASKS[task], Curve({0: 0.2, 9: 0.5}, dict(enumerate(RISING)))) == []
