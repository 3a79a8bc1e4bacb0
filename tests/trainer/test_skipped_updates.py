"""A run that takes no update does not end as if it had trained."""

import math

import pytest

from rlx.trainer.learning import MOST_SKIPPED, SkippedUpdates, UpdatesSkipped

SKIPPED = {"actor/grad_norm": math.nan, "actor/skipped": 2.0}
TAKEN = {"actor/grad_norm": 0.5, "actor/skipped": 1.0}


def test_steps_in_a_row_without_an_update_end_the_run():
    skipped = SkippedUpdates()
    skipped.judge(1, TAKEN)
    for step in range(2, MOST_SKIPPED + 1):
        skipped.judge(step, SKIPPED)
    skipped.judge(MOST_SKIPPED + 1, TAKEN)
    for step in range(11, 10 + MOST_SKIPPED):
        skipped.judge(step, SKIPPED)
    skipped.end()
    with pytest.raises(UpdatesSkipped, match="all updates of steps 11 to 15 were skipped"):
        skipped.judge(10 + MOST_SKIPPED, SKIPPED)


def test_a_run_whose_updates_were_all_skipped_is_no_success():
    skipped = SkippedUpdates()
    skipped.judge(1, SKIPPED | {"critic/grad_norm": 1.0})
    skipped.judge(2, {"actor/skipped": 0.0})  # no mini-batch had a token in the loss
    with pytest.raises(UpdatesSkipped, match=r"actor: all updates of the run \(1 steps\) were skipped"):
        skipped.end()
    SkippedUpdates().end()
