import math

import pytest

from rlx.config.schema import OptimConfig
from rlx.engine.optimizer import learning_rate_factor


def test_warm_up_is_linear_and_starts_above_zero():
    optim = OptimConfig(lr_warmup_steps=3)
    assert [learning_rate_factor(step, 10, optim) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warm_up_as_a_share_of_all_steps():
    optim = OptimConfig(lr_warmup_steps_ratio=0.2)
    assert [learning_rate_factor(step, 5, optim) for step in range(2)] == [0.5, 1.0]


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_schedules_pass_the_middle_and_end_at_the_floor(kind, middle):
    optim = OptimConfig(lr_scheduler_type=kind, min_lr_ratio=0.1, lr_warmup_steps=2)
    assert learning_rate_factor(2, 12, optim) == 1.0
    assert math.isclose(learning_rate_factor(7, 12, optim), middle)
    floor = 1.0 if kind == "constant" else 0.1
    assert math.isclose(learning_rate_factor(12, 12, optim), floor)
    assert math.isclose(learning_rate_factor(99, 12, optim), floor)
