from math import nan

from benchmarks.compare_commits import differences, is_compared


def test_each_metric_that_changed_came_or_went_is_listed():
    old = {"1": {"loss": 0.1, "kl": nan, "lr": 1.0}, "2": {"loss": 0.2}}
    new = {"1": {"loss": 0.1, "kl": nan, "new": 2}, "2": {"loss": 0.25}, "10": {"loss": 0.3}}
    assert differences(old, old) == []
    assert differences(old, new) == [
        "step 1 lr: 1.0 -> None",
        "step 1 new: None -> 2",
        "step 2 loss: 0.2 -> 0.25",
        "step 10 loss: None -> 0.3",
    ]


def test_times_and_memory_are_left_out():
    left_out = ("timing_s/step", "perf/tokens_per_s", "conversation/waited_s", "actor/peak_memory_gb", "time")
    assert not any(map(is_compared, left_out))
    assert all(map(is_compared, ("actor/grad_norm", "reward/mean", "conversation/turns", "step")))
