"""Simulate one training step under a plan: `predict` returns its time and its peak device memory.

Without torch: numbers in, numbers out.

Note [the step that is simulated]
Three workers run at the same time: the device computes, one direction of the link offloads, the other direction fetches.
*Forward.* The input of a layer is offloaded when the layer begins, the result of an operation when the operation has run. The
link copies in that order. Layer i begins once all offloaded bytes of layer i - 2 have been copied.
*Backward* begins once all bytes but those of the last layer have been copied. It runs the layers in reverse order. A layer's
bytes are fetched while the layer after it runs, from one of that layer's fetch points: the first with room for them, else the
last. The first fetch point is the begin of the recomputation. Recomputation runs as far as the fetched bytes allow; an operation
whose result is saved takes no time in it. The last layer fetches nothing: its bytes are still on the device.
*Disk.* Once the host is full, layers are offloaded to disk if there is one, each layer as a whole. That takes the disk's time
instead of the link's. All writes precede the first read.
*Memory* above weights and gradients has three parts: bytes that layers keep on the device, bytes that are being copied, and the
working set of the layer that runs. In forward this set is the layer's inputs, its temporary tensors, all tensors that autograd
saves of it, and the results that it offloads or keeps besides, until the layer ends. In backward it is `LayerCost.working_bytes`
and the results that the layer keeps although autograd does not save them. So keeping the last layer needs no more memory, unless
a wider one, such as the head, follows it.

Note [a layer as two lines]
A layer ends at the later of two times: it computes without a break from its begin; or the link copies without a break, and the
layer waits for the last bytes and then computes the rest. So a few numbers describe a layer under a plan (`LayerEstimate`), and
simulating a step takes a few additions per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan, Point


class Peaks(NamedTuple):
    """Peak memory by phase [bytes]: forward of all layers but the last, forward and backward of the last, backward of the others."""

    forward: int
    last: int
    backward: int


class Prediction(NamedTuple):
    """One simulated step."""

    step_s: float
    stall_s: float  # the part of `step_s` in which compute waits for the link or the disk
    peak_bytes: int  # peak memory above weights and gradients
    host_bytes: int  # offloaded bytes by tier
    disk_bytes: int
    forward_s: float
    peaks: Peaks


def held_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """Return the bytes that a layer keeps on the device from forward to backward."""
    if plan.keep:
        return cost.saved_bytes
    boundary = 0 if plan.offload_boundary else cost.boundary_bytes
    small = sum(cost.operations[i].small_bytes for i in plan.off_device)
    return boundary + small + sum(cost.operations[i].nbytes for i in plan.on_device)


def sent_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    return sum(nbytes for _, nbytes, _, _ in _transfers(cost, plan))


def recompute_s(cost: LayerCost, plan: LayerPlan) -> float:
    return 0.0 if plan.keep else _recomputed_until(cost, plan, 1.0, len(cost.operations))


def predict(costs: Sequence[LayerCost], layers: Sequence[LayerPlan], budget: Budget) -> Prediction:
    """Simulate one step. The budget's `device_bytes` decides at which fetch points bytes are fetched; with 0, at the last ones."""
    estimates = [estimate_layer(cost, plan, budget) for cost, plan in zip(costs, layers, strict=True)]
    prediction = simulate(assign_tiers(estimates, budget), budget)
    assert prediction is not None
    return prediction


class LayerEstimate(NamedTuple):
    """Times and sizes of one layer under a plan (Note [a layer as two lines])."""

    forward_s: float
    recompute_s: float
    backward_s: float
    out_s: float  # time of the link to offload the layer's bytes
    copied_s: float  # time from the layer's begin until all of them are copied, if the link is free
    in_s: float  # time of the link to fetch them
    ready_s: float  # time from the begin of the fetch to the end of recomputation, if compute waits for all transfers
    held_bytes: int  # kept on the device
    sent_bytes: int  # offloaded
    forward_bytes: int  # peak memory of forward
    working_bytes: int  # peak memory of backward
    points: tuple[tuple[float, int], ...]  # of each fetch point: time since backward began, peak memory from then on
    is_on_disk: bool = False
    on_disk: LayerEstimate | None = None  # that of the layer at the disk's rate; None if it cannot go there


def estimate_layer(cost: LayerCost, plan: LayerPlan, budget: Budget) -> LayerEstimate:
    """Return the estimate of a layer under a plan."""
    estimate = _estimate(cost, plan, budget.out_bytes_per_s, budget.in_bytes_per_s)
    if not budget.has_disk or not estimate.sent_bytes:
        return estimate
    rates = (min(rate, budget.disk_bytes_per_s) for rate in (budget.out_bytes_per_s, budget.in_bytes_per_s))
    return estimate._replace(on_disk=_estimate(cost, plan, *rates)._replace(is_on_disk=True))


def assign_tiers(estimates: Sequence[LayerEstimate], budget: Budget) -> Sequence[LayerEstimate]:
    """Return the estimates with each layer's tier: the host as long as it has room, then the disk."""
    if not budget.has_disk:
        return estimates
    room, found = budget.host_bytes or 0, []
    for estimate in estimates:
        if estimate.on_disk is not None and estimate.sent_bytes > room:
            found.append(estimate.on_disk)
        else:
            room -= estimate.sent_bytes
            found.append(estimate)
    return found


def _estimate(cost: LayerCost, plan: LayerPlan, out_rate: float, in_rate: float) -> LayerEstimate:
    again_s = recompute_s(cost, plan)
    out_s = copied_s = in_s = ready_s = 0.0
    for offload_at, nbytes, end, at in _transfers(cost, plan):
        seconds = _over(nbytes, out_rate)
        out_s, copied_s = out_s + seconds, max(copied_s, offload_at * cost.forward_s) + seconds
        in_s += _over(nbytes, in_rate)
        ready_s = max(ready_s, in_s + again_s - _recomputed_until(cost, plan, at, end))
    on_device = [] if plan.keep else [cost.operations[i] for i in plan.on_device]
    off_device = [] if plan.keep else [cost.operations[i] for i in plan.off_device]
    working_bytes = max(cost.working_bytes, cost.saved_bytes, cost.kept_bytes) if plan.keep else cost.working_bytes
    # Results that a layer keeps are freed when the layer ends, not when recomputation or backward has used them.
    extra = sum(op.extra_bytes for op in on_device)
    forward_bytes = cost.forward_bytes + extra + sum(op.extra_bytes for op in off_device)
    if not plan.keep and not plan.offload_boundary:
        extra += cost.extra_bytes

    def kept(point: Point) -> int:
        if point.forward_at is None:
            return 0
        return sum(op.nbytes - op.extra_bytes for op in on_device if op.at >= point.forward_at)

    return LayerEstimate(
        forward_s=cost.forward_s,
        recompute_s=again_s,
        backward_s=cost.backward_s,
        out_s=out_s,
        copied_s=copied_s,
        in_s=in_s,
        ready_s=ready_s,
        held_bytes=held_bytes(cost, plan),
        sent_bytes=sent_bytes(cost, plan),
        forward_bytes=max(cost.saved_bytes, forward_bytes),
        working_bytes=working_bytes + extra,
        points=tuple((cost.backward_s * point.at, point.nbytes + extra + kept(point)) for point in cost.fetch_points),
    )


def _transfers(cost: LayerCost, plan: LayerPlan) -> list[tuple[float, int, int, float]]:
    """Return the copies of a layer, in the order of both directions.

    Each is a tuple: when its bytes are offloaded (share of forward), their number, the index of the operation at which
    recomputation waits for them, and when that operation ends (share of forward).
    """
    if plan.keep:
        return []
    transfers = []
    for i in plan.off_device:
        op = cost.operations[i]
        offload_at = op.at if op.offload_at is None else op.offload_at
        transfers.append((offload_at, op.nbytes - op.small_bytes, i, op.at))
    transfers.sort(key=lambda transfer: (transfer[0], transfer[2]))
    return [(0.0, cost.boundary_bytes, 0, 0.0), *transfers] if plan.offload_boundary else transfers


def _recomputed_until(cost: LayerCost, plan: LayerPlan, at: float, end: int) -> float:
    """Return the time to recompute a layer up to operation `end`: the operations not saved, and share `at` of the rest."""
    saved = plan.on_device | plan.off_device
    rest_s = max(0.0, cost.recompute_s - sum(op.seconds for op in cost.operations))
    return rest_s * at + sum(op.seconds for i, op in enumerate(cost.operations[:end]) if i not in saved)


def _over(nbytes: int, rate: float) -> float:
    return nbytes / rate if rate else inf if nbytes else 0.0


def simulate(estimates: Sequence[LayerEstimate], budget: Budget, faster_than: float = inf) -> Prediction | None:
    """Simulate a step; None if it is not shorter than `faster_than` [s], or if that is given and the device lacks room."""
    fetches = choose_fetch_points(estimates, budget.device_bytes)
    peaks = _peaks(estimates, fetches, budget.loss_bytes)
    if max(peaks) > budget.device_bytes and faster_than < inf:
        return None
    forward_s, copied_before, copied = _forward(estimates)
    written = copied if any([estimate.is_on_disk for estimate in estimates]) else 0.0
    step_s = _backward(estimates, fetches, max(forward_s + budget.loss_s, copied_before), written)
    if step_s >= faster_than < inf:
        return None
    return Prediction(
        step_s,
        max(0.0, step_s - budget.loss_s - sum(map(compute_s, estimates))),
        max(peaks),
        sum(estimate.sent_bytes for estimate in estimates if not estimate.is_on_disk),
        sum(estimate.sent_bytes for estimate in estimates if estimate.is_on_disk),
        forward_s,
        peaks,
    )


def compute_s(estimate: LayerEstimate) -> float:
    """Return the compute time of a layer; a step takes at least the sum over its layers."""
    return estimate.forward_s + estimate.recompute_s + estimate.backward_s


def _forward(estimates: Sequence[LayerEstimate]) -> tuple[float, float, float]:
    """Return three times: the end of forward, the end of the copies of all layers but the last, and the end of all copies."""
    now = link_free = copied_before = copied = 0.0
    for estimate in estimates:
        now = max(now, copied_before)
        link_free = max(link_free + estimate.out_s, now + estimate.copied_s)
        now += estimate.forward_s
        copied_before, copied = copied, link_free
    return now, copied_before, copied


def choose_fetch_points(estimates: Sequence[LayerEstimate], device_bytes: int) -> list[int]:
    """Return for each layer the fetch point at which the bytes of the layer before are fetched: the first with room."""
    fetches, room, coming = [], device_bytes, 0
    for estimate in estimates:
        fetch = 0
        if coming and estimate.working_bytes + coming > room:
            fetch, last = 1, len(estimate.points) - 1
            while fetch < last and estimate.points[fetch][1] + coming > room:
                fetch += 1
        fetches.append(fetch)
        room -= estimate.held_bytes
        coming = estimate.sent_bytes
    return fetches


def _backward(estimates: Sequence[LayerEstimate], fetches: Sequence[int], now: float, written: float) -> float:
    """Return the end of a backward that begins at `now`; nothing is fetched before the time `written`."""
    asked, link_free = None, max(now, written)  # nothing is asked of the last layer: its bytes are still on the device
    for estimate, fetch in zip(reversed(estimates), reversed(fetches), strict=True):
        begins, began = now, now + estimate.recompute_s
        if asked is not None:
            link_free = max(link_free, asked)
            began = max(began, link_free + estimate.ready_s)
            link_free += estimate.in_s
        now = began + estimate.backward_s
        asked = began + estimate.points[fetch][0] if fetch else begins
    return now


def _peaks(estimates: Sequence[LayerEstimate], fetches: Sequence[int], loss_bytes: int) -> Peaks:
    """Return the peak memory by phase."""
    forward = backward = held = coming = last = 0
    for index, (estimate, fetch) in enumerate(zip(estimates, fetches, strict=True), 1):
        own = max(estimate.working_bytes + (0 if fetch else coming), estimate.points[fetch][1] + coming)
        if index == len(estimates):
            last = held + max(own, estimate.forward_bytes + coming)
        else:
            forward = max(forward, held + estimate.forward_bytes + coming)
            backward = max(backward, held + own)
        held += estimate.held_bytes
        coming = estimate.sent_bytes
    if loss_bytes:
        last = max(last, held + sum(estimate.sent_bytes for estimate in estimates[-2:]) + loss_bytes)
    return Peaks(forward, last, backward)
