"""A plan made of what layers have been measured to cost on the machine at hand, beside what the formulas say."""

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
    """What was measured where.

    Args:
        device: its name.
        layers: how many were built.
        costs: of each layer of the whole model.
        link_bytes_per_s: between device and host; None: too little was copied to tell.
        figures: all of it as JSON can hold it.
    """

    device: str
    layers: int
    costs: tuple[LayerCost, ...]
    link_bytes_per_s: float | None
    figures: Mapping[str, Any]


class MeasuredPlan(NamedTuple):
    """The plan, what it was made of, and what there was to spend."""

    costs: tuple[LayerCost, ...]
    plan: Plan
    machine: Budget


def plan_measured(measured: MeasuredCosts, setting: Scenario, tokens: int, uses_link: bool) -> MeasuredPlan:
    """The plan for measured layers, with the formulas' head behind them.

    Args:
        measured: the layers.
        setting: what is there beside them.
        tokens: that were measured.
        uses_link: take the link as measured, not the setting's.
    """
    costs = (*measured.costs, *setting.costs(tokens)[len(measured.costs) :])
    machine, link = setting.machine, measured.link_bytes_per_s
    if uses_link and link is not None:
        machine = replace(machine, out_bytes_per_s=link, in_bytes_per_s=link)
    return MeasuredPlan(costs, make_plan(costs, machine), machine)


def describe_measured(measured: MeasuredCosts, setting: Scenario, tokens: int, outcome: MeasuredPlan) -> str:
    """Measured and computed costs of one layer of each kind, and the plan."""
    rows: list[tuple[str, ...]] = [
        ("layer", "", "forward ms", "backward ms", "recomputed ms", "saved MB", "working MB"),
    ]
    computed = setting.costs(tokens)
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
