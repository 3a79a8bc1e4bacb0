"""A plan as one table: what becomes of which layers, what that brings, and what stands in the way of more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import assign_tiers, estimate_layer, held_bytes, predict, recompute_s, sent_bytes
from rlx.offload.plan.text_table import GB, aligned

WORTH_SAYING = 2e-3  # of the step's time
_PLAN_COLUMNS = ("layers", "kept on the device", "leaves", "recomputed", "GB kept", "GB sent", "s saved")


def explain(costs: Sequence[LayerCost], plan: Plan, machine: Budget) -> str:
    """The plan as text.

    Args:
        costs: of each layer.
        plan: of `make_plan` for them.
        machine: that it was made for.
    """
    groups: dict[tuple[LayerCost, LayerPlan], list[int]] = {}
    for index, key in enumerate(zip(costs, plan.layers, strict=True)):
        groups.setdefault(key, []).append(index)
    rows = [_row(cost, layer, members) for (cost, layer), members in groups.items()]
    return "\n".join([*aligned([_PLAN_COLUMNS, *rows], texts=4), "", *_summary(costs, plan, machine)])


def _row(cost: LayerCost, layer: LayerPlan, members: Sequence[int]) -> tuple[str, ...]:
    names = [op.name for op in cost.operations]
    inputs = ["inputs"] * (cost.boundary_bytes > 0 and not layer.keep)
    stays = inputs * (not layer.offload_boundary) + [names[i] for i in sorted(layer.on_device)]
    leaves = inputs * layer.offload_boundary + [names[i] for i in sorted(layer.off_device)]
    saved = layer.on_device | layer.off_device
    again = [name for i, name in enumerate(names) if i not in saved] + ["rest"]
    saved_s = recompute_s(cost, LayerPlan()) - recompute_s(cost, layer)
    return (
        f"{_ranges(members)} ({len(members)})",
        "all" if layer.keep else ", ".join(stays) or "-",
        ", ".join(leaves) or "-",
        ", ".join(again) if recompute_s(cost, layer) else "-",
        f"{len(members) * held_bytes(cost, layer) / GB:.2f}",
        f"{len(members) * sent_bytes(cost, layer) / GB:.2f}",
        f"{len(members) * saved_s:.3f}",
    )


def _ranges(numbers: Sequence[int], longest: int = 4) -> str:
    """`0-2, 5` for 0, 1, 2, 5; the middle left out where there are many."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    return ", ".join(texts if len(texts) <= longest else [*texts[: longest - 1], "...", texts[-1]])


def _summary(costs: Sequence[LayerCost], plan: Plan, machine: Budget) -> Iterable[str]:
    found = plan.prediction
    plain = predict(costs, [LayerPlan(keep=True)] * len(costs), machine)
    boundary = predict(costs, [LayerPlan()] * len(costs), replace(machine, device_bytes=0))
    yield (
        f"step {found.step_s:.3f} s, {found.step_s / plain.step_s:.3f} x plain ({plain.step_s:.3f} s, {_gb(plain.peak_bytes)}), "
        f"{found.step_s / boundary.step_s:.3f} x inputs alone ({boundary.step_s:.3f} s, {_gb(boundary.peak_bytes)}); "
        f"compute waits {found.stall_s:.3f} s"
    )
    out_s, in_s = _link_seconds(costs, plan, machine)
    forward_s = found.forward_s + machine.turnaround_s  # what is between counts as forward: the link may go on
    yield (
        f"link{' or disk' * (found.disk_bytes > 0)} busy {out_s / forward_s:.0%} of forward, {in_s / (found.step_s - forward_s):.0%} of backward; "
        f"fetched {_fetched(costs, plan)}"
    )
    host = "no limit" if machine.host_bytes is None else _gb(machine.host_bytes)
    too_much = " (DOES NOT FIT)" if found.peak_bytes > machine.device_bytes else ""
    disk = f", disk {_gb(found.disk_bytes)}" if machine.has_disk else ""
    yield (
        f"peak {_gb(found.peak_bytes)} of {_gb(machine.device_bytes)}{too_much}, "
        f"host {_gb(found.host_bytes)} of {host}{disk}"
    )
    yield _limits(costs, plan, machine, plain.step_s)


def _fetched(costs: Sequence[LayerCost], plan: Plan) -> str:
    """When what leaves is asked for, and of how many layers."""
    counts: Counter[str] = Counter()
    for behind, fetch, before, layer in zip(costs[1:], plan.fetches[1:], costs, plan.layers, strict=False):
        if sent_bytes(before, layer):
            point = behind.fetch_points[fetch]
            late = f"with the backward of {point.name}" if point.name else f"after {point.at:.0%} of backward"
            counts["with the recomputation" if not fetch else late] += 1
    return ", ".join(f"{when} ({count})" for when, count in counts.most_common()) or "never"


def _link_seconds(costs: Sequence[LayerCost], plan: Plan, machine: Budget) -> tuple[float, float]:
    """The link's or the disk's time in forward and in backward; the last layer fetches nothing."""
    parts = assign_tiers(
        [estimate_layer(cost, layer, machine) for cost, layer in zip(costs, plan.layers, strict=True)], machine
    )
    return sum(part.out_s for part in parts), sum(part.in_s for part in parts[:-1])


def limits(costs: Sequence[LayerCost], plan: Plan, machine: Budget) -> dict[str, float]:
    """What keeps the plan from being faster, in words, and the step's time with more of it [s]."""
    out, back = 2 * machine.out_bytes_per_s, 2 * machine.in_bytes_per_s
    more = {
        "link full (twice as fast": replace(machine, out_bytes_per_s=out, in_bytes_per_s=back),
        "device full (twice the room": replace(machine, device_bytes=2 * machine.device_bytes),
        "host full (without a limit": replace(machine, host_bytes=None),
        "disk full (twice as fast": replace(machine, disk_bytes_per_s=2 * machine.disk_bytes_per_s),
    }
    seconds = {words: make_plan(costs, other, plan.layers).prediction.step_s for words, other in more.items()}
    return {words: step_s for words, step_s in seconds.items() if step_s < plan.prediction.step_s * (1 - WORTH_SAYING)}


def _limits(costs: Sequence[LayerCost], plan: Plan, machine: Budget, plain_s: float) -> str:
    if not any(recompute_s(cost, layer) for cost, layer in zip(costs, plan.layers, strict=True)):
        return "nothing is left to recompute"
    found = limits(costs, plan, machine)
    texts = [f"{words}: {step_s / plain_s:.3f} x plain)" for words, step_s in found.items()]
    return "limit: " + (", ".join(texts) or "what is left to recompute saves too little time")


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.2f} GB"
