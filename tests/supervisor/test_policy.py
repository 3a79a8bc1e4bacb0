"""Which ends of a driver are followed by another start."""

from rlx.supervisor.keeper import End, refusal

DIED = End("rank 1 died", step=7)
OUT_OF_MEMORY = End("rank 0: OutOfMemoryError: 3 GiB", step=7, error="OutOfMemoryError in actor.update")


def test_what_was_lost_is_replaced_until_the_restarts_are_used_up():
    assert refusal([DIED], 2) is None
    assert refusal([DIED, DIED], 2) is None
    assert "trainer.max_restarts=2" in refusal([DIED, DIED, DIED], 2)
    assert "trainer.max_restarts=0" in refusal([DIED], 0)


def test_the_same_error_at_the_same_step_ends_the_run_the_second_time():
    assert refusal([OUT_OF_MEMORY], 3) is None
    other_size = OUT_OF_MEMORY._replace(reason="rank 1: OutOfMemoryError: 4 GiB")
    assert "came twice in step 7" in refusal([OUT_OF_MEMORY, DIED, other_size], 9)
    assert refusal([OUT_OF_MEMORY, OUT_OF_MEMORY._replace(step=8)], 3) is None
    assert refusal([OUT_OF_MEMORY, OUT_OF_MEMORY._replace(error="OutOfMemoryError in critic.update")], 3) is None


def test_a_mistake_of_the_user_is_not_repeated():
    assert refusal([End("ValueError: row 7", step=1, error="ValueError", curable=False)], 3) is not None
