"""When a call counts as hung, without processes: the decision is a function of beats and times."""

from rlx.cluster.hang import HangWatch, Standing

WORKS, WAITS = Standing(3, "engine.py:1 update", False, "stack"), Standing(3, "update, inside all_reduce", True, "")


def test_progress_of_one_rank_counts_for_all():
    watch = HangWatch(10.0, now_s=0.0)
    assert watch.faults({0: WAITS, 1: WORKS}, now_s=9.0) == []
    assert watch.faults({0: WAITS, 1: WORKS._replace(beats=4)}, now_s=18.0) == []
    assert watch.faults({0: WAITS, 1: WORKS._replace(beats=4)}, now_s=27.0) == []
    assert watch.faults({0: WAITS, 1: WORKS._replace(beats=4)}, now_s=28.5) != []


def test_the_rank_that_others_wait_for_comes_first():
    def order(standings):
        watch = HangWatch(10.0, now_s=0.0)
        watch.faults(standings, now_s=0.0)
        return [fault.rank for fault in watch.faults(standings, now_s=11.0)]

    assert order({0: WAITS, 1: WORKS, 2: WAITS}) == [1, 0, 2]
    assert order({0: WAITS, 1: WORKS, 2: None}) == [2, 1, 0]
    assert order({0: None, 1: None}) == [0, 1]


def test_ranks_that_never_answered_hang_from_the_beginning_of_the_call():
    watch = HangWatch(10.0, now_s=100.0)
    assert watch.faults({0: None}, now_s=109.0) == []
    (fault,) = watch.faults({0: None}, now_s=110.0)
    assert fault.kind == "hung" and fault.curable and "no progress for 10 s" in fault.summary
