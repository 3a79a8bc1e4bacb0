"""The nightly command's table and verdict, from finished runs; docs/tools.md has figures of real ones."""

import json

import pytest

from rlx.benchmarks import learns


def finished(folder, accuracies):
    folder.mkdir()
    rows = [{"step": 20 * place, "val/accuracy": value} for place, value in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "report.png").touch()


def test_it_counts_the_points_from_the_first_validation_to_the_last(tmp_path, capsys):
    finished(tmp_path / "guessing-grpo", [0.3, 0.6, 0.55])
    finished(tmp_path / "guessing-ppo", [0.3, 0.41])
    assert learns.main(["--out", str(tmp_path), "--tasks", "guessing-grpo,guessing-ppo"]) == 0
    shown = capsys.readouterr().out
    assert "+25.0" in shown and "30.0% 60.0% 55.0%" in shown and "+11.0" in shown and "TOO FEW" not in shown


def test_too_few_points_are_a_failure(tmp_path, capsys):
    finished(tmp_path / "calculator-grpo-seed-7", [0.1, 0.29])
    finished(tmp_path / "guessing-ppo-seed-7", [0.3, 0.6])
    assert learns.main(["--out", str(tmp_path), "--tasks", "calculator-grpo,guessing-ppo", "--seed", "7"]) == 1
    assert "TOO FEW" in capsys.readouterr().out


def test_an_unknown_task_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        learns.main(["--out", str(tmp_path), "--tasks", "chess"])
    assert "got chess, expected some of arithmetic-grpo" in capsys.readouterr().err
