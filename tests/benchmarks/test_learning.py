"""The command's table, picture and verdict from finished runs; the runs themselves are those of `tests/trainer/test_run.py`."""

import json

import pytest

from benchmarks import learning
from benchmarks.learning import PLAIN


def finished(folder, accuracies, reward=0.5):
    folder.mkdir()
    rows = [{"step": 10 * place, "val/accuracy": value} for place, value in enumerate(accuracies)]
    lines = [json.dumps({**row, "reward/mean": reward, "time": 1.0}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "report.png").touch()


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["learning", "--out", str(tmp_path), *arguments])
        monkeypatch.setenv("COLUMNS", "120")
        learning.main()
        return capsys.readouterr().out

    return run


def test_finished_runs_are_not_repeated_and_their_curves_are_compared(command, tmp_path):
    for seed, last in (1, 0.7), (2, 0.8):
        finished(tmp_path / f"GRPO-1-{seed}", [0.5, last])
        finished(tmp_path / f"GRPO-without-offload-1-{seed}", [0.5, last])
    output = command("--recipes", f"GRPO,{PLAIN}", "--difficulties", "1", "--seeds", "1,2")
    assert "75.0% ± 7.1" in output and "+25.0" in output and "70.0%, 80.0%" in output
    assert "the curves are equal" in output
    assert (tmp_path / "learning.png").stat().st_size > 10_000

    finished(tmp_path / "GRPO-1-3", [0.5, 0.6], reward=0.5)
    finished(tmp_path / "GRPO-without-offload-1-3", [0.5, 0.6], reward=0.5000001)
    assert "the curves are DIFFERENT" in command(
        "--recipes", f"GRPO,{PLAIN}", "--difficulties", "1", "--seeds", "1,2,3"
    )
