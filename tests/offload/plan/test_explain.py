"""The table of a plan: who is in which group, what the figures are, and what is said to stand in the way."""

import re
from dataclasses import replace

import pytest

from rlx.offload.plan.costs import Budget, LayerPlan
from rlx.offload.plan.explain import explain, limits
from rlx.offload.plan.planner import make_plan
from rlx.offload.plan.step import predict

AMPLE = Budget(1e9, 1e9, 10**6)


def rows_of(text):
    """The cells of each line of the table."""
    lines = text.split("\n\n")[0].splitlines()
    return [re.split(r"\s{2,}", line) for line in lines[1:]]


def test_groups_and_their_figures(decoder_layer):
    cost = replace(decoder_layer(), saved_bytes=3 * 10**9, boundary_bytes=10**9)
    costs = [cost] * 6
    whole, inputs = LayerPlan(keep=True), LayerPlan()
    attention = LayerPlan(offload_boundary=False, off_device=frozenset({3}), on_device=frozenset({0}))
    layers = (inputs, attention, attention, inputs, attention, whole)
    plan = make_plan(costs, AMPLE)._replace(layers=layers, prediction=predict(costs, layers, AMPLE))
    rows = rows_of(explain(costs, plan, AMPLE))
    saved_s = 3 * (cost.operations[0].seconds + cost.operations[3].seconds)
    assert rows == [
        ["0, 3 (2)", "-", "inputs", "q, k, v, attention, o, gate, up, rest", "0.00", "2.00", "0.000"],
        ["1-2, 4 (3)", "inputs, q", "attention", "k, v, o, gate, up, rest", "3.00", "0.00", f"{saved_s:.3f}"],
        ["5 (1)", "all", "-", "-", "3.00", "0.00", f"{cost.recompute_s:.3f}"],
    ]


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Budget(20, 1e9, 430), ["link full", "device full"]),
        (Budget(1e9, 1e9, 600, host_bytes=200), ["device full", "host full"]),
        (Budget(1e9, 1e9, 1500, host_bytes=0), ["device full", "host full"]),
        (Budget(1e9, 1e9, 10**5), []),
    ],
)
def test_what_stands_in_the_way(decoder_layer, machine, words):
    costs = [decoder_layer()] * 8
    plan = make_plan(costs, machine)
    found = limits(costs, plan, machine)
    assert [name.split(" (")[0] for name in found] == words
    assert all(step_s < plan.prediction.step_s for step_s in found.values())
    text = explain(costs, plan, machine)
    assert all(word in text.splitlines()[-1] for word in words or ["nothing is left to recompute"])
