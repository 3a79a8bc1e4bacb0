"""A plan from measured costs of layers, compared with the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rlx.offload.plan.costs import Budget, LayerCost
from rlx.offload.plan.explain import explain
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.scenario import Scenario
from rlx.offload.plan.text_table import GB, aligned


class MeasuredCosts(NamedTuple):
    """Costs of layers as measured on a device.

    Args:
        device: its name.
        layers: number of layers that were built.
        costs: of each layer of the whole model.
        link_bytes_per_s: rate between device and host; None: too few bytes were copied to know it.
        figures: everything as JSON can hold it.
    """

    device: str
    layers: int
    costs: tuple[LayerCost, ...]
    link_bytes_per_s: float | None
    figures: Mapping[str, Any]


class MeasuredPlan(NamedTuple):
    """A plan, with the costs and the budget that it was made for."""

    costs: tuple[LayerCost, ...]
    plan: Plan
    budget: Budget


def plan_measured(measured: MeasuredCosts, scenario: Scenario, tokens: int, uses_link: bool) -> MeasuredPlan:
    """Plan measured layers, with the head as the formulas have it.

    Args:
        measured: costs of the layers.
        scenario: the budget, and the cost of the head.
        tokens: number of tokens that the layers were measured with.
        uses_link: use the measured rate of the link instead of the scenario's.
    """
    costs = (*measured.costs, *scenario.costs(tokens)[len(measured.costs) :])
    budget, link = scenario.budget, measured.link_bytes_per_s
    if uses_link and link is not None:
        budget = replace(budget, out_bytes_per_s=link, in_bytes_per_s=link)
    return MeasuredPlan(costs, make_plan(costs, budget), budget)


def describe_measured(measured: MeasuredCosts, scenario: Scenario, tokens: int, outcome: MeasuredPlan) -> str:
    """Return measured and computed costs of one layer of each kind, and the plan, as text."""
    rows: list[tuple[str, ...]] = [
        ("layer", "", "forward ms", "backward ms", "recomputed ms", "saved MB", "working MB"),
    ]
    computed = scenario.costs(tokens)
    for index in sorted({measured.costs.index(cost) for cost in measured.costs}):
        for what, cost in (("measured", measured.costs[index]), ("computed", computed[index])):
            times = (f"{seconds * 1e3:.3f}" for seconds in (cost.forward_s, cost.backward_s, cost.recompute_s))
            sizes = (f"{nbytes / 1e6:.1f}" for nbytes in (cost.saved_bytes, cost.working_bytes))
            rows.append((str(index), what, *times, *sizes))
    link = measured.link_bytes_per_s
    return "\n".join(
        [
            f"measured: {measured.layers} layers in bf16 on {measured.device}"
            + ("" if link is None else f", copies to and from the host at {link / GB:.1f} GB/s"),
            "",
            *aligned(rows, texts=2),
            "",
            "auto, from what was measured:",
            explain(*outcome),
        ]
    )
