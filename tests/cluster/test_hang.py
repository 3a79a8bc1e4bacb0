"""When a call counts as hung, without processes: the decision is a function of beats and times."""

import pytest

from rlx.cluster.group import HangWatch
from rlx.cluster.process import Standing

WORKS, WAITS = Standing(3, "engine.py:1 update", "", False, "stack"), Standing(3, "update", "all_reduce", True, "")


def test_progress_of_one_rank_counts_for_all():
    watch = HangWatch(10.0, began_s=0.0)
    assert watch.faults({0: WAITS, 1: WORKS}, now_s=9.0) == []
    assert watch.faults({0: WAITS, 1: WORKS._replace(beats=4)}, now_s=18.0) == []
    assert watch.faults({0: WAITS, 1: WORKS._replace(beats=4)}, now_s=27.0) == []
    assert watch.faults({0: WAITS, 1: WORKS._replace(beats=4)}, now_s=28.5) != []


def test_the_rank_that_others_wait_for_comes_first():
    def order(standings):
        watch = HangWatch(10.0, began_s=0.0)
        assert watch.faults(standings, now_s=2.0) == []
        return [fault.rank for fault in watch.faults(standings, now_s=12.0)]

    assert order({0: WAITS, 1: WORKS, 2: WAITS}) == [1, 0, 2]
    assert order({0: WAITS, 1: WORKS, 2: None}) == [2, 1, 0]
    assert order({0: None, 1: None}) == [0, 1]


def test_ranks_that_never_answered_hang_from_the_beginning_of_the_call():
    watch = HangWatch(10.0, began_s=100.0)
    assert watch.faults({0: None}, now_s=109.0) == []
    (fault,) = watch.faults({0: None}, now_s=110.0)
    assert fault.kind == "hung" and fault.curable and "no progress for 10 s" in fault.summary


def test_a_driver_that_has_not_looked_for_long_cannot_say_how_long_a_rank_stands():
    watch = HangWatch(10.0, began_s=0.0)
    assert watch.faults({0: None}, now_s=11.0) == [] and watch.due_s == 13.5
    assert watch.faults({0: None}, now_s=20.0) == [] != watch.faults({0: None}, now_s=21.0)


@pytest.mark.parametrize("beats", [0, 3])
def test_a_library_works_long_before_the_first_beat_and_loops_after_it(beats):
    """A model loads at one place in rlx, and so runs the endless loop of a user's loss: stacks differ, places do not."""
    watch = HangWatch(10.0, began_s=0.0)
    looks = [WORKS._replace(beats=beats, inside=f"mine.py:{line}", stack=f"line {line}") for line in range(4)]
    assert [bool(watch.faults({0: look}, 4.0 * turn)) for turn, look in enumerate(looks)] == [False] * 3 + [beats > 0]


def test_another_place_in_rlx_is_progress():
    watch = HangWatch(10.0, began_s=0.0)
    for turn in range(4):
        assert watch.faults({0: WORKS._replace(place=f"adamw.py:{turn} step")}, 9.0 * turn) == []
