import json
import shutil
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlx.errors import StorageError
from rlx.trainer.tracking import TensorboardLogger, Tracker, TrackingError, read_metrics


def tracker(run_dir: Path, *loggers: str, resume_step: int | None = None) -> Tracker:
    tracking = Tracker(loggers, run_dir, "trainer:\n  seed: 1\n", "project", "experiment")
    if resume_step is not None:
        tracking.rewind(resume_step)
    return tracking


def rows(run_dir: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_written_whatever_the_user_asked_for_and_is_valid_with_nan(tmp_path: Path):
    with tracker(tmp_path, "console") as tracking:
        tracking.log({"a": 1.5, "b": float("nan"), "c": float("-inf")}, 1)
        assert len(rows(tmp_path)) == 1, "a step must be on disk before the next begins"
        tracking.log({"a": 2}, 2)
    first, second = rows(tmp_path)
    assert first["time"] > 0 and {k: first[k] for k in "abc"} == {"a": 1.5, "b": None, "c": None} and first["step"] == 1
    assert (second["step"], second["a"]) == (2, 2.0)


def test_a_resume_neither_doubles_nor_loses_rows_and_drops_a_line_torn_by_a_kill(tmp_path: Path):
    with tracker(tmp_path) as tracking:
        for step in range(5):
            tracking.log({"a": 1.0}, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "a": 0.')
    with tracker(tmp_path, resume_step=4):
        assert [row["step"] for row in rows(tmp_path)] == [*range(5)]
    with tracker(tmp_path, resume_step=2) as tracking:
        tracking.log({"a": 2.0}, 3)
    assert [(row["step"], row["a"]) for row in rows(tmp_path)] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    with tracker(tmp_path, resume_step=-1):
        assert rows(tmp_path) == []
    later = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in later] == [3, 4, 0, 1, 2, 3]


def test_a_damaged_line_is_named_before_anything_starts_and_one_without_numbers_where_it_is_read(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(TrackingError, match=r"metrics\.jsonl, line 2: got 'nonsense', expected"):
        tracker(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    lines = [{"step": 1, "note": "by hand"}, {"step": 2, "note": "by hand"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with tracker(tmp_path, resume_step=1) as tracking:
        tracking.log({"reward/mean": 0.5}, 2)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept[0] == lines[0] and kept[-1]["step"] == 2 and kept[-1]["reward/mean"] == 0.5, "a note stays"
    with pytest.raises(TrackingError, match=r"by hand.* expected numbers"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_full_disk_stops_the_run_with_whole_rows(tiny_disk: Path):
    logged = 0
    with (
        tracker(tiny_disk) as tracking,
        pytest.raises(StorageError, match=r"metrics\.jsonl: no space is left \(0\.000 GB"),
    ):
        while logged < 1000:
            tracking.log({f"name_{i}": 1.0 for i in range(97)}, logged + 1)
            logged += 1
    assert [row["step"] for row in rows(tiny_disk)] == list(range(1, logged + 1)) and logged > 5


def test_a_lost_folder_and_a_run_that_may_not_write_show_at_the_next_row(tmp_path: Path):
    def refuse() -> None:
        raise StorageError("taken")

    folder = tmp_path / "run"
    folder.mkdir()
    with tracker(folder) as tracking:
        tracking.log({"a": 1.0}, 1)
        shutil.rmtree(folder)
        with pytest.raises(StorageError, match=r"metrics\.jsonl: the folder is gone"):
            tracking.log({"a": 1.0}, 2)
    with Tracker((), tmp_path, "", "p", "e", may_write=refuse) as tracking, pytest.raises(StorageError, match="taken"):
        tracking.log({"a": 1.0}, 2)


def scalars(folder: Path) -> tuple[list[tuple[int, float]], list[str]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")], events.Tags()["tensors"]


def test_tensorboard_keeps_scalars_and_texts_and_hides_what_a_resume_replaces(tmp_path: Path):
    """Also where the checkpoint to resume from is damaged and the run goes further back."""
    with tracker(tmp_path, "tensorboard") as tracking:
        for step in (1, 2, 3, 4):
            tracking.log({"reward/mean": step / 10, "actor/grad_norm": float("inf")}, step)
        tracking.generations([{"prompt": "1+1?", "response": "#### 2", "score": 1.0}], 2)
    with tracker(tmp_path, "tensorboard", resume_step=3) as tracking:
        tracking.log({"reward/mean": 0.8}, 4)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2, "no file without need"
    shown = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.8)]
    assert scalars(tmp_path) == (shown, ["val/generation_0/text_summary"])
    with tracker(tmp_path, "tensorboard", resume_step=4) as tracking:
        tracking.rewind(2)
        tracking.log({"reward/mean": 0.9}, 3)
    shown = [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert scalars(tmp_path)[0] == shown
    assert [(row["step"], row["reward/mean"]) for row in rows(tmp_path)] == shown


def test_a_logger_that_fails_gives_one_notice_and_the_file_has_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever fails, also at the end, which comes after the training."""

    def fail(*_: object) -> None:
        raise ConnectionError("no route to host")

    for method in ("log", "generations", "close"):
        monkeypatch.setattr(TensorboardLogger, method, fail)
    notices: list[str] = []
    with Tracker(("tensorboard",), tmp_path, "", "p", "e", notice=notices.append) as tracking:
        for step in (1, 2):
            tracking.log({"a": 1.0}, step)
            tracking.generations([{"prompt": "1+1?"}], step)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    (notice,) = notices
    assert notice.startswith("logger tensorboard has failed") and "(ConnectionError: no route to host)" in notice


def test_a_logger_that_cannot_start_is_named_with_the_cause_and_one_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closed: list[TensorboardLogger] = []
    monkeypatch.setattr(TensorboardLogger, "close", lambda logger: closed.append(logger))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackingError, match=r"wandb.*not installed.*pip install wandb.*trainer\.logger"):
        tracker(tmp_path, "wandb", "tensorboard")
    assert len(closed) == 1
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("a file where the folder should be")
    with pytest.raises(TrackingError, match=r"tensorboard cannot start \(FileExistsError.*remove tensorboard"):
        tracker(tmp_path / "run", "tensorboard")


def test_wandb_keeps_metrics_and_continues_its_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="wandb is optional and not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with tracker(tmp_path, "wandb") as tracking:
        tracking.log({"reward/mean": 0.5}, 1)
        tracking.generations([{"prompt": "1+1?", "response": "2"}], 1)
    run_id = (tmp_path / "wandb_run_id").read_text()
    with tracker(tmp_path, "wandb", resume_step=1) as tracking:
        tracking.log({"reward/mean": 0.6}, 2)
    assert (tmp_path / "wandb_run_id").read_text() == run_id
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
