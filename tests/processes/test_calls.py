"""Limits of user code."""

import signal
import time

from rlx.processes.calls import at_work
from rlx.user_code import TooLong


def test_no_timer_is_left_by_calls_that_end_as_it_fires():
    kept = []  # an error that is kept keeps the frames of its call
    for turn in range(2000):
        try:
            with at_work(1e-3, waiting_counts=True):
                end = time.perf_counter() + 1e-3 - 5e-6 * (turn % 8)
                while time.perf_counter() < end:
                    pass
        except TooLong as fault:
            kept.append(fault)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert kept
