"""The table of a plan: who is in which group, what the figures are, and what is said to stand in the way."""

import re
from pathlib import Path

import pytest

from rlx.offload.plan.costs import Budget
from rlx.offload.plan.explain import explain, limits
from rlx.offload.plan.planner import make_plan


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


def test_the_code_of_the_page_runs(capsys):
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert "x plain" in capsys.readouterr().out
