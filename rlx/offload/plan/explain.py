"""A plan as a table for people: tensors kept, offloaded and recomputed, time saved, and the resources that limit the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import assign_tiers, estimate_layer, held_bytes, predict, recompute_s, sent_bytes
from rlx.offload.plan.text_table import GB, aligned

WORTH_SAYING = 2e-3  # a resource counts as a limit if more of it saves at least this share of the step's time
_PLAN_COLUMNS = ("layers", "kept on the device", "offloaded", "recomputed", "GB kept", "GB sent", "s saved")


def explain(costs: Sequence[LayerCost], plan: Plan, budget: Budget) -> str:
    groups: dict[tuple[LayerCost, LayerPlan], list[int]] = {}
    for index, key in enumerate(zip(costs, plan.layers, strict=True)):
        groups.setdefault(key, []).append(index)
    rows = [_row(cost, layer, members) for (cost, layer), members in groups.items()]
    return "\n".join([*aligned([_PLAN_COLUMNS, *rows], texts=4), "", *_summary(costs, plan, budget)])


def _row(cost: LayerCost, layer: LayerPlan, members: Sequence[int]) -> tuple[str, ...]:
    names = [op.name for op in cost.operations]
    inputs = ["inputs"] * (cost.boundary_bytes > 0 and not layer.keep)
    kept = inputs * (not layer.offload_boundary) + [names[i] for i in sorted(layer.on_device)]
    offloaded = inputs * layer.offload_boundary + [names[i] for i in sorted(layer.off_device)]
    saved = layer.on_device | layer.off_device
    again = [name for i, name in enumerate(names) if i not in saved] + ["rest"]
    saved_s = recompute_s(cost, LayerPlan()) - recompute_s(cost, layer)
    return (
        f"{_ranges(members)} ({len(members)})",
        "all" if layer.keep else ", ".join(kept) or "-",
        ", ".join(offloaded) or "-",
        ", ".join(again) if recompute_s(cost, layer) else "-",
        f"{len(members) * held_bytes(cost, layer) / GB:.2f}",
        f"{len(members) * sent_bytes(cost, layer) / GB:.2f}",
        f"{len(members) * saved_s:.3f}",
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2, 5; of more than four runs leave out the middle ones."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]])


def _summary(costs: Sequence[LayerCost], plan: Plan, budget: Budget) -> Iterable[str]:
    found = plan.prediction
    plain = predict(costs, [LayerPlan(keep=True)] * len(costs), budget)
    boundary = predict(costs, [LayerPlan()] * len(costs), replace(budget, device_bytes=0))
    yield (
        f"step {found.step_s:.3f} s, {found.step_s / plain.step_s:.3f} x plain ({plain.step_s:.3f} s, {_gb(plain.peak_bytes)}), "
        f"{found.step_s / boundary.step_s:.3f} x boundary ({boundary.step_s:.3f} s, {_gb(boundary.peak_bytes)}); "
        f"compute waits {found.stall_s:.3f} s"
    )
    layers = zip(costs, plan.layers, strict=True)
    estimates = assign_tiers([estimate_layer(cost, layer, budget) for cost, layer in layers], budget)
    out_s = sum(one.out_s for one in estimates)
    in_s = sum(one.in_s for one in estimates[:-1])  # the last fetches nothing
    forward_s = found.forward_s + budget.loss_s  # copies continue during the loss, so it counts as forward
    yield (
        f"link{' or disk' * (found.disk_bytes > 0)} busy {out_s / forward_s:.0%} of forward, "
        f"{in_s / (found.step_s - forward_s):.0%} of backward; fetched {_fetched(costs, plan)}"
    )
    host = "no limit" if budget.host_bytes is None else _gb(budget.host_bytes)
    too_much = " (DOES NOT FIT)" if found.peak_bytes > budget.device_bytes else ""
    disk = f", disk {_gb(found.disk_bytes)}" if budget.has_disk else ""
    yield (
        f"peak {_gb(found.peak_bytes)} of {_gb(budget.device_bytes)}{too_much}, "
        f"host {_gb(found.host_bytes)} of {host}{disk}"
    )
    yield _limits(costs, plan, budget, plain.step_s)


def _fetched(costs: Sequence[LayerCost], plan: Plan) -> str:
    """Return at which points offloaded bytes are fetched, each with its number of layers."""
    counts: Counter[str] = Counter()
    for behind, fetch, before, layer in zip(costs[1:], plan.fetches[1:], costs, plan.layers, strict=False):
        if sent_bytes(before, layer):
            point = behind.fetch_points[fetch]
            late = f"with the backward of {point.name}" if point.name else f"after {point.at:.0%} of backward"
            counts["with the recomputation" if not fetch else late] += 1
    return ", ".join(f"{when} ({count})" for when, count in counts.most_common()) or "never"


def limits(costs: Sequence[LayerCost], plan: Plan, budget: Budget) -> dict[str, float]:
    """Return the resources that limit the plan: each in words, and the step's time with more of it [s]."""
    out, back = 2 * budget.out_bytes_per_s, 2 * budget.in_bytes_per_s
    more = {
        "link full (twice as fast": replace(budget, out_bytes_per_s=out, in_bytes_per_s=back),
        "device full (twice the room": replace(budget, device_bytes=2 * budget.device_bytes),
        "host full (without a limit": replace(budget, host_bytes=None),
        "disk full (twice as fast": replace(budget, disk_bytes_per_s=2 * budget.disk_bytes_per_s),
    }
    seconds = {words: make_plan(costs, other, plan.layers).prediction.step_s for words, other in more.items()}
    return {words: step_s for words, step_s in seconds.items() if step_s < plan.prediction.step_s * (1 - WORTH_SAYING)}


def _limits(costs: Sequence[LayerCost], plan: Plan, budget: Budget, plain_s: float) -> str:
    if not any(recompute_s(cost, layer) for cost, layer in zip(costs, plan.layers, strict=True)):
        return "nothing is left to recompute"
    found = limits(costs, plan, budget)
    texts = [f"{words}: {step_s / plain_s:.3f} x plain)" for words, step_s in found.items()]
    return "limit: " + (", ".join(texts) or "what is left to recompute saves too little time")


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.2f} GB"
