"""When checkpoints are due and when they are whole, with workers that only write a file."""

import os
from dataclasses import replace

import pytest
from run_tools import STATE, Disk, saver_of

from rlx.checkpoint.manifest import damage
from rlx.errors import StorageError
from rlx.trainer.checkpoints import checkpoints_in


def test_a_checkpoint_appears_when_all_is_written_and_is_whole(tmp_path):
    (tmp_path / ".global_step_5.partial/actor").mkdir(parents=True)
    workers = Disk(busy=1)
    saver = saver_of(tmp_path, workers)
    assert os.listdir(tmp_path) == [], "what a killed run left is removed"
    saver.begin(STATE)
    saver.settle()
    assert os.listdir(tmp_path) == [".global_step_3.partial"], "still being written"
    saver.settle()
    assert os.listdir(tmp_path) == ["global_step_3"]
    assert damage(tmp_path / "global_step_3") == []
    saver.settle()
    saver.finish()
    assert workers.calls == ["begin_save", "is_written", "is_written", "finish_save"]


def test_the_save_before_is_finished_first_and_old_ones_leave(tmp_path):
    saver = saver_of(tmp_path, Disk(busy=9), max_actor_ckpt_to_keep=1)
    for step in (3, 4):
        saver.begin(replace(STATE, step=step))
    assert sorted(os.listdir(tmp_path)) == [".global_step_4.partial", "global_step_3"]
    saver.finish()
    assert os.listdir(tmp_path) == ["global_step_4"]


@pytest.mark.parametrize("fails", ["begin_save", "finish_save"])
def test_a_failed_save_leaves_nothing_and_the_older_ones_whole(fails, tmp_path):
    workers = Disk()
    saver = saver_of(tmp_path, workers, max_actor_ckpt_to_keep=1)
    saver.begin(STATE)
    saver.finish()
    workers.fails = fails
    with pytest.raises(StorageError, match="full"):
        saver.begin(replace(STATE, step=4))
        saver.finish()
    assert os.listdir(tmp_path) == ["global_step_3"]
    assert damage(tmp_path / "global_step_3") == []


def test_saves_by_steps_and_by_minutes(tmp_path):
    now = [0.0]
    by_steps = saver_of(tmp_path, Disk(), save_freq=4)
    assert [step for step in range(1, 11) if by_steps.is_due(step, 10)] == [4, 8, 10]
    by_time = saver_of(tmp_path, Disk(), lambda: now[0], save_every_minutes=1.0)
    assert not by_time.is_due(1, 10)
    now[0] = 61.0
    assert by_time.is_due(2, 10)
    by_time.begin(STATE)
    assert not by_time.is_due(3, 10) and by_time.is_due(10, 10)
    assert not saver_of(tmp_path, Disk()).is_due(10, 10), "by default nothing is saved"


def test_a_save_within_a_time_succeeds_or_leaves_the_older_ones(tmp_path):
    now = iter(range(1000))
    workers = Disk(busy=3)
    saver = saver_of(tmp_path, workers, lambda: float(next(now)))
    assert saver.save_now(STATE, within_s=20) == tmp_path / "global_step_3"
    assert saver.save_now(STATE, within_s=20) == tmp_path / "global_step_3", "it is there already"
    assert workers.calls.count("begin_save") == 1
    workers.busy = 99
    assert saver.save_now(replace(STATE, step=4), within_s=3) is None
    assert damage(tmp_path / "global_step_3") == []


def test_the_last_step_is_saved_if_no_save_was_due(tmp_path):
    workers = Disk()
    saver = saver_of(tmp_path / "checkpoints", workers)
    saver.close(STATE)
    assert [each.name for each in checkpoints_in(tmp_path / "checkpoints")] == ["global_step_3"]
    assert workers.calls == ["begin_save", "finish_save"]
    saver.close(STATE)
    assert workers.calls == ["begin_save", "finish_save"], "it is there"
    saver_of(tmp_path / "none", Disk(), save_last=False).close(STATE)
    assert not (tmp_path / "none").exists()
