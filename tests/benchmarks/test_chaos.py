"""The harness of the nightly runs: that plans repeat, that moments come, and that a difference is found."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "chaos"))
from faults import FAULTS, MOMENTS, plans
from outcome import Trajectory, differences, end_what_is_left, new_mark

UNBROKEN = Trajectory([{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.6}], "abc", {"2.jsonl": "def"})


def test_a_seed_gives_the_same_fault_and_fifty_of_them_all_faults_and_moments():
    fifty = list(plans(0, 50))
    assert list(plans(20, 1)) == [fifty[20]]
    assert {plan.fault for plan in fifty} == set(FAULTS)
    assert Counter(plan.moment for plan in fifty).keys() == set(MOMENTS)


def test_every_difference_is_found():
    assert differences(UNBROKEN, UNBROKEN) == []
    other = [UNBROKEN.rows[0], {"step": 2, "reward/mean": 0.7}]
    assert differences(UNBROKEN, UNBROKEN._replace(rows=other)) == ["step 2: reward/mean differ (1 in all)"]
    doubled = [*UNBROKEN.rows, UNBROKEN.rows[-1]]
    assert differences(UNBROKEN, UNBROKEN._replace(rows=doubled)) == ["rows of steps [1, 2, 2] instead of [1, 2]"]
    assert differences(UNBROKEN, UNBROKEN._replace(weights="x", validation={})) == [
        "weights differ",
        "validations differ",
    ]


def test_a_process_that_a_run_left_is_found_by_its_mark_and_ended():
    ours, other = new_mark(), new_mark()
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeps, env={**os.environ, **ours}) as left:
        assert end_what_is_left(other, patience_s=0.0) == []
        (found,) = end_what_is_left(ours, patience_s=0.0)
        assert str(left.pid) in found
        assert left.wait(10) == -9
