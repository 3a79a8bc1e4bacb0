import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from rlx.trainer.report import write_report
from rlx.trainer.tracking import TrackingError, read_metrics


def write(path: Path, rows: list[dict], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def training_rows(steps: int) -> list[dict]:
    rows: list[dict] = [{"step": 0, "val/accuracy": 0.3, "val/reward": 0.3}]
    for step in range(1, steps + 1):
        row = {
            **{"step": step, "time": 1e9 + step, "reward/mean": 0.3 + step / 100, "reward/accuracy": 0.3},
            **{"actor/ppo_kl": 1e-4, "actor/entropy": 0.5},
            "actor/grad_norm": None if step == 2 else 10.0**step if step < 4 else 1.0,
            **{"actor/skipped": float(step == 2), "response_length/mean": 40.0, "response_length/clip_ratio": 0.1},
            **{"timing_s/rollout": 1.0, "timing_s/update_actor": 2.0, "timing_s/a phase of somebody else's": 1.0},
            "timing_s/step": 4.5,
        }
        rows.append(row | ({"val/accuracy": 0.4} if step % 5 == 0 else {}))
    return rows


def test_nulls_times_and_the_line_being_written_are_left_out(tmp_path: Path):
    path = write(
        tmp_path / "m.jsonl",
        [{"step": 0, "val/accuracy": 0.3}, {"step": 1, "time": 5.0, "a": 1.0, "b": None}],
        '{"step": 2',
    )
    assert read_metrics(path) == {0: {"val/accuracy": 0.3}, 1: {"a": 1.0}}


def test_steps_that_a_resumed_run_replaces_are_dropped_and_equal_steps_are_merged(tmp_path: Path):
    steps = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (3, 3.0)]
    path = write(tmp_path / "m.jsonl", [*({"step": s, "a": a} for s, a in steps), {"step": 3, "b": 1.0}])
    assert read_metrics(path) == {1: {"a": 0.1}, 2: {"a": 0.2}, 3: {"a": 3.0, "b": 1.0}}


@pytest.mark.parametrize("line", ["{", '{"a": 1}', "[1]", '{"step": null}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(TrackingError, match="line 2"):
        read_metrics(path)


@pytest.mark.parametrize(
    "rows", [[], training_rows(0), training_rows(1), training_rows(6), training_rows(150)], ids=len
)
def test_a_run_of_any_length_is_drawn(tmp_path: Path, rows: list[dict]):
    picture = write_report(write(tmp_path / "m.jsonl", rows), tmp_path / "report.png")
    pixels = imread(picture)
    height, width = pixels.shape[:2]
    assert (height, width) == (988, 1755)
    coloured = (pixels[..., :3].max(axis=2) - pixels[..., :3].min(axis=2)) > 0.4
    for top in (0, height // 2):
        for left in range(3):
            panel = coloured[top : top + height // 2, left * width // 3 : (left + 1) * width // 3]
            assert panel.any() == (len(rows) > 1 or (len(rows) == 1 and top == 0 and left < 2))


def test_the_command_draws_beside_the_metrics_and_says_what_is_missing(tmp_path: Path):
    write(tmp_path / "metrics.jsonl", training_rows(3))
    command = [sys.executable, "-m", "rlx.trainer.report"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "report.png").stat().st_size > 10_000
    (tmp_path / "report.png").unlink()
    (tmp_path / "report.png").mkdir()
    told = {"": "/report.png: Is a directory", "/report.png": "/report.png: no metrics", "/no": "/no: no such folder; "}
    for name, what in told.items():
        failed = subprocess.run([*command, f"{tmp_path}{name}"], capture_output=True, text=True)
        assert failed.returncode == 2 and failed.stderr.startswith("python -m rlx.trainer.report: ")
        assert f"{tmp_path}{what}" in failed.stderr and "Traceback" not in failed.stderr
