"""Plans: what is chosen in cases that can be thought through, what holds for every plan, and the best of all plans."""

import itertools
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan, Operation
from rlx.offload.plan.planner import make_plan
from rlx.offload.plan.step import predict

KEPT, STAYS, BOUNDARY = LayerPlan(keep=True), LayerPlan(offload_boundary=False), LayerPlan()
NO_LINK = Budget(0, 0, 0)


def simple(operations=(), working=40):
    return LayerCost(1.0, 2.0, 0.8, 10, saved_bytes=30, working_bytes=working, late_bytes=20, operations=operations)


def plain_s(costs):
    return sum(cost.forward_s + cost.backward_s for cost in costs)


def boundary(costs, machine):
    return predict(costs, [BOUNDARY] * len(costs), machine)


# What is chosen


def test_what_is_needed_late_leaves_in_place_of_what_is_needed_early():
    # Both may leave at the end of forward alone, as much saves as much. Only the late one is back in time.
    early, late = (Operation(name, at, 0.2, 50, offload_at=0.9) for name, at in (("early", 0.3), ("late", 0.8)))
    cost = LayerCost(1.0, 2.0, 0.6, 10, 300, 430, 180, (early, late), late_at=0.7)
    plan = make_plan([cost] * 12, Budget(70, 70, 430))
    assert [layer.off_device for layer in plan.layers] == [{1}] * 11 + [set()]
    assert plan.prediction.stall_s == pytest.approx(0, abs=0.02)


def test_without_a_link_the_inputs_stay():
    costs = [simple()] * 4
    plan = make_plan(costs, replace(NO_LINK, device_bytes=3 * 10 + 40))
    assert plan.layers == (STAYS, STAYS, STAYS, KEPT)
    assert plan.prediction.stall_s == pytest.approx(0)


def test_no_budget_at_all_still_does_the_best_at_the_least_memory(decoder_layer):
    costs = [decoder_layer()] * 5
    machine = Budget(1e9, 1e9, 0)
    plan = make_plan(costs, machine)
    assert plan.prediction.peak_bytes == boundary(costs, machine).peak_bytes
    assert plan.prediction.step_s < 0.9 * boundary(costs, machine).step_s


# What holds for every plan


@st.composite
def cases(draw):
    """Layers of one to three kinds that follow each other in turn, and a machine."""
    seed, count = draw(st.integers(0, 10**6)), draw(st.integers(1, 10))
    random_ = random.Random(seed)
    kinds = [random_cost(random_, random_.randint(0, 4)) for _ in range(draw(st.integers(1, 3)))]
    costs = [kinds[i % len(kinds)] for i in range(count)]
    whole = sum(cost.saved_bytes for cost in costs)
    least = max(cost.working_bytes for cost in costs)
    out, back = (draw(st.sampled_from([0, 5, 20, 50, 200])) for _ in range(2))
    host = draw(st.none() | st.integers(0, whole))
    return costs, Budget(out, back, draw(st.sampled_from([0, least])) + draw(st.integers(0, whole)), host)


def random_cost(random_, operations):
    shares = [random_.random() for _ in range(operations + 1)]
    found, at = [], 0.0
    for name, share in enumerate(shares[:-1]):
        at += share / sum(shares)
        seconds = share / sum(shares) * random_.uniform(0.5, 1)
        found.append(Operation(str(name), at, seconds, random_.randint(1, 40)))
    inputs = random_.randint(1, 10)
    saved = inputs + sum(op.nbytes for op in found) + random_.randint(0, 30)
    working = saved + random_.randint(0, 60)
    recompute = sum(op.seconds for op in found) + random_.uniform(0, 0.2)
    late = random_.randint(inputs, working)
    return LayerCost(1.0, random_.uniform(1, 3), recompute, inputs, saved, working, late, tuple(found))


def leanest_peak(costs, machine):
    """The least device memory that plans of inputs alone need: as many off the device as the host takes, in the planner's order."""
    return make_plan(costs, replace(machine, device_bytes=0)).prediction.peak_bytes


@settings(max_examples=40)
@given(cases())
def test_every_plan_keeps_to_the_budgets_and_pays_off(case):
    costs, machine = case
    plan = make_plan(costs, machine)
    found = plan.prediction
    room = max(machine.device_bytes, leanest_peak(costs, machine))
    assert found == predict(costs, plan.layers, replace(machine, device_bytes=room))
    assert found.stall_s >= 0
    assert found.step_s >= plain_s(costs) * (1 - 1e-12)
    assert found.peak_bytes <= room
    assert machine.host_bytes is None or found.host_bytes <= machine.host_bytes
    inputs_alone = boundary(costs, machine)
    is_possible = machine.out_bytes_per_s and machine.in_bytes_per_s
    if is_possible and (machine.host_bytes is None or inputs_alone.host_bytes <= machine.host_bytes):
        assert found.step_s <= inputs_alone.step_s
        assert found.peak_bytes <= max(machine.device_bytes, inputs_alone.peak_bytes)
    assert make_plan(list(costs), machine) == plan


# The best of all plans


def every_layer_plan(cost):
    yield KEPT
    for places in itertools.product(range(3), repeat=len(cost.operations)):
        on, off = (frozenset(i for i, p in enumerate(places) if p == place) for place in (1, 2))
        yield LayerPlan(False, True, on, off)
        yield LayerPlan(False, False, on, off)


def best_step_s(costs, machine):
    options = [list(every_layer_plan(cost)) for cost in costs]
    found = (predict(costs, plans, machine) for plans in itertools.product(*options))
    return min(
        one.step_s for one in found if one.peak_bytes <= machine.device_bytes and one.host_bytes <= machine.host_bytes
    )


def small_case(seed):
    """Two to four layers whose inputs alone fit."""
    random_ = random.Random(seed)
    count = random_.choice([2, 3, 4])
    kinds = [random_cost(random_, 2 if count == 2 else 1) for _ in range(random_.choice([1, 2]))]
    costs = [kinds[i % len(kinds)] for i in range(count)]
    whole = sum(cost.saved_bytes for cost in costs)
    out = random_.choice([5, 20, 50, 100])
    machine = Budget(out, out * random_.choice([0.5, 1, 2]), 0, random_.randint(50, whole + 50))
    least = boundary(costs, machine).peak_bytes
    return costs, replace(machine, device_bytes=least + random_.randint(0, whole))


def test_close_to_the_best_of_all_plans():
    ratios = []
    for seed in range(12):
        costs, machine = small_case(seed)
        ratios.append(make_plan(costs, machine).prediction.step_s / best_step_s(costs, machine))
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.05
    assert statistics.mean(ratios) <= 1.005
