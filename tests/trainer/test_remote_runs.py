"""Runs with a URL: copies of checkpoints, and which of them is fetched."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event
from uuid import uuid4

import pytest
from run_tools import STATE, Disk, make, saver_of

from rlx.checkpoint.folders import RemoteFolder
from rlx.checkpoint.manifest import damage
from rlx.config.schema import PPOConfig
from rlx.errors import StorageError
from rlx.trainer import checkpoints as ck
from rlx.trainer.run_lock import LOCK_FILE
from rlx.trainer.saver import fetch


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"memory://{uuid4()}/runs"


def with_trainer(**changes):
    base = PPOConfig()
    return replace(base, trainer=replace(base.trainer, **changes))


LOCAL = Path("outputs/rlx/run")


def test_checkpoints_and_the_runs_files_are_copied_and_removed_ones_are_removed_there(url, tmp_path):
    run = tmp_path / LOCAL / "2026-01-02"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("1")
    saver = saver_of(run / "checkpoints", Disk(), default_local_dir=url, max_actor_ckpt_to_keep=1)
    for step in (3, 4):
        saver.begin(replace(STATE, step=step))
        saver.finish()
    (run / "metrics.jsonl").write_text("1 2")
    saver.close()
    remote = RemoteFolder(url)
    assert remote.names() == ["2026-01-02"] and remote.names("2026-01-02") == ["checkpoints", "metrics.jsonl"]
    assert remote.names("2026-01-02/checkpoints") == ["global_step_4"]
    shutil.rmtree(run)
    named = f"{url}/2026-01-02/checkpoints/global_step_4"
    fetched = Path(fetch(with_trainer(resume_mode="resume_path", resume_from_path=named)).trainer.resume_from_path)
    assert fetched == run / "checkpoints/global_step_4" and damage(fetched) == []
    assert (run / "metrics.jsonl").read_text() == "1 2"


def test_a_checkpoint_stays_while_it_is_copied_and_those_that_wait_do_not(url, tmp_path, monkeypatch):
    put, copying, may_go_on = RemoteFolder.put, Event(), Event()

    def slow(remote, path, name):
        copying.set()
        assert may_go_on.wait(60)
        put(remote, path, name)

    monkeypatch.setattr(RemoteFolder, "put", slow)
    checkpoints = tmp_path / LOCAL / "2026-01-02/checkpoints"
    checkpoints.mkdir(parents=True)
    saver = saver_of(checkpoints, Disk(), default_local_dir=url, max_actor_ckpt_to_keep=1)

    def save(step):
        saver.begin(replace(STATE, step=step))
        saver.finish()
        return sorted(os.listdir(checkpoints))

    save(3)
    assert copying.wait(60)
    save(4)
    assert save(5) == ["global_step_3", "global_step_5"]
    may_go_on.set()
    saver.close()
    assert os.listdir(checkpoints) == RemoteFolder(url).names("2026-01-02/checkpoints") == ["global_step_5"]


def test_the_lock_may_go_while_the_runs_files_are_copied(url, tmp_path, monkeypatch):
    """A run that ends removes it, perhaps before the last copy."""
    run = tmp_path / LOCAL / "2026-01-02"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("metrics.jsonl", LOCK_FILE, f"{LOCK_FILE}.aside"):
        (run / name).touch()
    put = RemoteFolder.put

    def put_late(remote, path, name):
        if path.name.startswith(LOCK_FILE):
            path.unlink()
        put(remote, path, name)

    monkeypatch.setattr(RemoteFolder, "put", put_late)
    saver = saver_of(run / "checkpoints", Disk(), default_local_dir=url)
    saver.begin(STATE)
    saver.close()
    assert RemoteFolder(url).names("2026-01-02") == ["checkpoints", "metrics.jsonl"]


def test_a_run_that_is_ended_waits_for_copies_while_there_is_time_and_tells_of_one_that_failed(
    url, tmp_path, monkeypatch
):
    copying, may_go_on = Event(), Event()

    def fails_late(remote, path, name):
        copying.set()
        assert may_go_on.wait(60)
        raise StorageError("no route to the bucket")

    monkeypatch.setattr(RemoteFolder, "put", fails_late)
    checkpoints = tmp_path / LOCAL / "2026-01-02/checkpoints"
    checkpoints.mkdir(parents=True)
    saver = saver_of(checkpoints, Disk(), default_local_dir=url)
    assert saver.save_now(STATE, within_s=60) == checkpoints / "global_step_3"
    assert copying.wait(60)
    saver.wait_for_copies(0.0)
    may_go_on.set()
    with pytest.raises(StorageError, match="no route to the bucket"):
        saver.wait_for_copies(60)
    assert ck.is_finished(checkpoints / "global_step_3"), "the local one is whole"


def test_a_url_that_cannot_be_used_stops_the_run_before_it_starts(tmp_path):
    with pytest.raises(StorageError, match="nonsense://runs"):
        fetch(with_trainer(default_local_dir="nonsense://runs"))
    for url in ("memory://runs/a/b/c", "memory://global_step_1", "http://x", "s3://b/../checkpoints/global_step_1"):
        with pytest.raises(ck.ResumeError, match=f"got {url}, expected the URL of a checkpoint, .*global_step_N"):
            fetch(with_trainer(resume_mode="resume_path", resume_from_path=url))
    for url, said in (
        ("memory://runs/a/checkpoints/global_step_1", "got 0 files without manifest.json"),
        ("s3://bucket/a/checkpoints/global_step_1", "needs a package: Install s3fs"),
        ("nonsense://runs/a/checkpoints/global_step_1", "nonsense://runs"),
    ):
        with pytest.raises(StorageError, match=said) as raised:
            fetch(with_trainer(resume_mode="resume_path", resume_from_path=url))
        assert url.partition("/a/")[0] in str(raised.value)


def test_a_copy_that_fails_ends_the_run_at_the_next_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("a file where the folder would be")
    saver = saver_of(tmp_path / "run/checkpoints", Disk(), default_local_dir=f"file://{tmp_path}/runs")
    saver.begin(STATE)
    with pytest.raises(StorageError, match="runs/run/checkpoints/global_step_3"):
        saver.close()
    assert ck.is_finished(tmp_path / "run/checkpoints/global_step_3"), "the local one is whole"


def test_auto_fetches_the_newest_whole_one_of_the_newest_run(url, tmp_path):
    elsewhere, remote = tmp_path / "elsewhere", RemoteFolder(url)
    for run, step in (("a", 90), ("b", 2), ("b", 10), ("b", 12)):
        remote.upload(make(elsewhere / run, step, "actor"), f"{run}/checkpoints/global_step_{step}")
    remote.put(
        elsewhere / "b/checkpoints/global_step_2/actor/manifest.json", "b/checkpoints/global_step_12/actor/weights"
    )
    remote.remove("b/checkpoints/global_step_14")
    remote.put(elsewhere / "b/checkpoints/global_step_2/driver.json", "b/checkpoints/global_step_14/driver.json")
    config = with_trainer(default_local_dir=url, resume_mode="auto")
    assert fetch(config) == config
    choice = ck.starting_checkpoint(config)
    assert choice.checkpoint == tmp_path / LOCAL / "b/checkpoints/global_step_10"
    assert "passed over global_step_12" in choice.passed_over[0], "its weights are others"
    assert sorted(os.listdir(choice.checkpoint.parent)) == ["global_step_10", "global_step_12"]
    assert ck.set_aside_later(choice.checkpoint.parent, 10, url) == ["global_step_12", "global_step_14"]
    fetch(config)
    assert ck.starting_checkpoint(config) == (choice.checkpoint, []), "later ones are set aside there, too"
    assert remote.names("b/checkpoints/superseded") == ["global_step_12", "global_step_14"]
    make(tmp_path / LOCAL / "c", 1, "actor")
    fetch(config)
    assert ck.starting_checkpoint(config).checkpoint.parent.parent.name == "c", "a newer local run"
