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


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run the command with runs that end with the given accuracies and rewards by task; None: the run fails."""

    def run(curves, *more):
        def trained(folder, overrides):
            assert not folder.exists(), "a folder is used again"
            curve = curves[folder.name]
            if curve is None:
                raise RuntimeError("it ended with exit code 1")
            metrics(folder, *curve)

        monkeypatch.setattr(learns, "train", trained)
        monkeypatch.setenv("COLUMNS", "120")
        code = learns.main(["--out", str(tmp_path), "--tasks", ",".join(curves), *more])
        return code, capsys.readouterr()

    return run


RISING = [0.3] * 5 + [0.5] * 5


def test_it_counts_points_and_reward_and_each_call_has_a_folder(command):
    curves = {"guessing-grpo": ([0.3, 0.6, 0.55], RISING), "guessing-ppo": ([0.3, 0.41], RISING)}
    for _ in range(2):
        code, shown = command(curves)
        assert code == 0 and shown.out.count("right") == 2
        assert (
            "+25.0" in shown.out and "30.0% 60.0% 55.0%" in shown.out and "+11.0" in shown.out and "+0.200" in shown.out
        )


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


def test_the_others_go_on_behind_a_task_that_fails(command):
    code, shown = command({"calculator-grpo": None, "guessing-ppo": ([0.3, 0.6], RISING)}, "--seed", "7")
    assert code == 1 and "FAILED: RuntimeError" in shown.out and "right" in shown.out
    assert "calculator-grpo: it ended with exit code 1" in shown.err
