"""One training step of a plan, played through: how long it takes and how much device memory it needs at most.

Without torch: numbers in, numbers out.

Note [the step that is played through]
Three things take turns or run side by side: the device computes, one direction of the link sends, the other fetches.
*Forward.* A layer's input leaves when the layer begins, the result of an operation when it has run; the link sends them in
order. A layer begins once what the layer two before it sent has left.
*Backward* begins once all has left but what the last layer sent. Layers come in reverse order. A layer's bytes are asked for
while the layer behind it runs: at the earliest of that layer's points from which on there is room for them, the first of which
is the begin of its recomputation; at the last one where there is none. Recomputation goes as far as what has arrived lets it;
a saved operation takes no time in it. What the last layer sent is still there.
*Disk.* What leaves once the host is full goes to the disk, if there is one: of each layer all or nothing. It takes the disk's
time instead of the link's, and nothing is read before all has been written.
*Memory* for backward, above weights and gradients: what kept layers and operations hold on the device, what is on its way,
and what the layer at work needs for itself: in forward what autograd saves of it, all of which is there until it ends, with
its inputs, what else it is just computing and the results it sends or keeps that autograd does not, beside what the layer
before is still sending; in backward its working set, beside the results it keeps that autograd does not, which stay to the end. The peak stands where backward is in one of the last layers, or in the widest, or at the end of forward.
The last layer can therefore be kept at no price in memory, unless something wider follows it.

Note [a layer as two lines]
What a layer does to the clock is the later of two: it computes without a break from where it begins, or it waits for the
link, which works without a break, and then has left what comes after the piece that it waited for. So each layer is a
handful of numbers, worked out once for each choice (`LayerEstimate`), and playing a step through is a few additions a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan, Point


class Peaks(NamedTuple):
    """The most that is held at once while all layers but the last go forward, from the last one's forward to its backward, and
    in backward of the others.
    """

    forward: int
    last: int
    backward: int


class Prediction(NamedTuple):
    """One step of a plan: its time, that in which compute waits for the link, the peak, what lies off the device and where,
    forward's time, and the peak by phase.
    """

    step_s: float
    stall_s: float
    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    forward_s: float
    peaks: Peaks


def held_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """What a layer holds on the device from forward to backward."""
    if plan.keep:
        return cost.saved_bytes
    boundary = 0 if plan.offload_boundary else cost.boundary_bytes
    stays = sum(cost.operations[i].small_bytes for i in plan.off_device)
    return boundary + stays + sum(cost.operations[i].nbytes for i in plan.on_device)


def sent_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """What of a layer leaves the device."""
    return sum(nbytes for _, nbytes, _, _ in _sent(cost, plan))


def recompute_s(cost: LayerCost, plan: LayerPlan) -> float:
    """Time in which a layer's recomputation computes."""
    return 0.0 if plan.keep else _recomputed_until(cost, plan, 1.0, len(cost.operations))


def predict(costs: Sequence[LayerCost], layers: Sequence[LayerPlan], machine: Budget) -> Prediction:
    """Plays one step through (Note [the step that is played through]).

    Args:
        costs, layers: of each layer, from the first to the last.
        machine: link and budgets; `device_bytes` says when bytes are asked for, 0 as late as can be.
    """
    parts = [estimate_layer(cost, plan, machine) for cost, plan in zip(costs, layers, strict=True)]
    prediction = simulate(assign_tiers(parts, machine), machine)
    assert prediction is not None
    return prediction


class LayerEstimate(NamedTuple):
    """What a step needs to know of one layer (Note [a layer as two lines]).

    Args:
        forward_s, recompute_s, backward_s: compute.
        out_s: the link's time for what leaves.
        left_s: from the layer's begin until all has left, where the link is free.
        in_s: the link's time for what is fetched.
        ready_s: from the fetch's begin until recomputation is over, where the device waits for every piece.
        held_bytes, sent_bytes, forward_bytes, working_bytes: memory.
        points: of `LayerCost.fetch_points` the time from the begin of backward, and the most that is held from there on.
        is_on_disk: whether what leaves goes to disk, at its rate.
        on_disk: the same if it does; None where it cannot.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    out_s: float
    left_s: float
    in_s: float
    ready_s: float
    held_bytes: int
    sent_bytes: int
    forward_bytes: int
    working_bytes: int
    points: tuple[tuple[float, int], ...]
    is_on_disk: bool = False
    on_disk: LayerEstimate | None = None


def estimate_layer(cost: LayerCost, plan: LayerPlan, machine: Budget) -> LayerEstimate:
    """What a step needs to know of a layer under a plan."""
    part = _part(cost, plan, machine.out_bytes_per_s, machine.in_bytes_per_s)
    if not machine.has_disk or not part.sent_bytes:
        return part
    rates = (min(rate, machine.disk_bytes_per_s) for rate in (machine.out_bytes_per_s, machine.in_bytes_per_s))
    return part._replace(on_disk=_part(cost, plan, *rates)._replace(is_on_disk=True))


def assign_tiers(parts: Sequence[LayerEstimate], machine: Budget) -> Sequence[LayerEstimate]:
    """The layers with what leaves on the host for as long as that has room, then on disk."""
    if not machine.has_disk:
        return parts
    room, found = machine.host_bytes or 0, []
    for part in parts:
        if part.on_disk is not None and part.sent_bytes > room:
            found.append(part.on_disk)
        else:
            room -= part.sent_bytes
            found.append(part)
    return found


def _part(cost: LayerCost, plan: LayerPlan, out_rate: float, in_rate: float) -> LayerEstimate:
    again_s = recompute_s(cost, plan)
    out_s = left_s = in_s = ready_s = 0.0
    for offload_at, nbytes, end, at in _sent(cost, plan):
        seconds = _over(nbytes, out_rate)
        out_s, left_s = out_s + seconds, max(left_s, offload_at * cost.forward_s) + seconds
        in_s += _over(nbytes, in_rate)
        ready_s = max(ready_s, in_s + again_s - _recomputed_until(cost, plan, at, end))
    # What was kept of a layer is let go with the layer, not when recomputation, or backward, is through with it.
    stays = sum(cost.operations[i].extra_bytes for i in plan.on_device) + cost.extra_bytes * (not plan.offload_boundary)
    stays = 0 if plan.keep else stays

    def kept(point: Point) -> int:
        if plan.keep or point.forward_at is None:
            return 0
        operations = map(cost.operations.__getitem__, plan.on_device)
        return sum(op.nbytes - op.extra_bytes for op in operations if op.at >= point.forward_at)

    return LayerEstimate(
        forward_s=cost.forward_s,
        recompute_s=again_s,
        backward_s=cost.backward_s,
        out_s=out_s,
        left_s=left_s,
        in_s=in_s,
        ready_s=ready_s,
        held_bytes=held_bytes(cost, plan),
        sent_bytes=sent_bytes(cost, plan),
        forward_bytes=_forward_bytes(cost, plan),
        working_bytes=_working_bytes(cost, plan) + stays,
        points=tuple((cost.backward_s * point.at, point.nbytes + stays + kept(point)) for point in cost.fetch_points),
    )


def _working_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    return max(cost.working_bytes, cost.saved_bytes, cost.kept_bytes) if plan.keep else cost.working_bytes


def _forward_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """What is there at most while a layer goes forward."""
    held = () if plan.keep else plan.on_device | plan.off_device
    return max(cost.saved_bytes, cost.forward_bytes + sum(cost.operations[i].extra_bytes for i in held))


def _sent(cost: LayerCost, plan: LayerPlan) -> list[tuple[float, int, int, float]]:
    """What leaves, in order, which is that of coming back: where in forward, how much, at which operation it is needed
    again, and where in forward that ends.
    """
    if plan.keep:
        return []
    operations = [(i, cost.operations[i]) for i in plan.off_device]
    pieces = [
        (op.at if op.offload_at is None else op.offload_at, op.nbytes - op.small_bytes, i, op.at)
        for i, op in operations
    ]
    pieces.sort(key=lambda piece: (piece[0], piece[2]))
    return [(0.0, cost.boundary_bytes, 0, 0.0), *pieces] if plan.offload_boundary else pieces


def _recomputed_until(cost: LayerCost, plan: LayerPlan, at: float, end: int) -> float:
    """Time of recomputing a layer before its operation `end`: those not saved, and as much of the rest as lies before `at`."""
    saved = plan.on_device | plan.off_device
    rest_s = max(0.0, cost.recompute_s - sum(op.seconds for op in cost.operations))
    return rest_s * at + sum(op.seconds for i, op in enumerate(cost.operations[:end]) if i not in saved)


def _over(nbytes: int, rate: float) -> float:
    return nbytes / rate if rate else inf if nbytes else 0.0


def simulate(parts: Sequence[LayerEstimate], machine: Budget, faster_than: float = inf) -> Prediction | None:
    """What is expected of a step of these layers.

    None if it takes as long as `faster_than` or longer [s]; where that is given also if the device has no room for it.
    """
    fetches = choose_fetch_points(parts, machine.device_bytes)
    peaks = _peaks(parts, fetches, machine.turnaround_bytes)
    if max(peaks) > machine.device_bytes and faster_than < inf:
        return None
    forward_s, left_before, left = _forward(parts)
    written = left if any([part.is_on_disk for part in parts]) else 0.0
    step_s = _backward(parts, fetches, max(forward_s + machine.turnaround_s, left_before), written)
    if step_s >= faster_than < inf:
        return None
    return Prediction(
        step_s,
        max(0.0, step_s - machine.turnaround_s - sum(map(compute_s, parts))),
        max(peaks),
        sum(part.sent_bytes for part in parts if not part.is_on_disk),
        sum(part.sent_bytes for part in parts if part.is_on_disk),
        forward_s,
        peaks,
    )


def compute_s(part: LayerEstimate) -> float:
    """Time in which the device computes for a layer, which a step cannot be shorter than."""
    return part.forward_s + part.recompute_s + part.backward_s


def _forward(parts: Sequence[LayerEstimate]) -> tuple[float, float, float]:
    """When forward ends, and when all has left that the last layer but one and the last send."""
    now = link_free = left_before = left = 0.0
    for part in parts:
        now = max(now, left_before)
        link_free = max(link_free + part.out_s, now + part.left_s)
        now += part.forward_s
        left_before, left = left, link_free
    return now, left_before, left


def choose_fetch_points(parts: Sequence[LayerEstimate], device_bytes: int) -> list[int]:
    """In the backward of each layer the point at which what the layer before has sent is asked for: the first with room."""
    fetches, room, coming = [], device_bytes, 0
    for part in parts:
        fetch = 0
        if coming and part.working_bytes + coming > room:
            last = len(part.points) - 1
            fetch = 1
            while fetch < last and part.points[fetch][1] + coming > room:
                fetch += 1
        fetches.append(fetch)
        room -= part.held_bytes
        coming = part.sent_bytes
    return fetches


def _backward(parts: Sequence[LayerEstimate], fetches: Sequence[int], now: float, written: float) -> float:
    """When backward ends that begins now, where nothing is fetched before all has been `written`."""
    asked, link_free = now, max(now, written)
    is_here = True
    for part, fetch in zip(reversed(parts), reversed(fetches), strict=True):
        begins, began = now, now + part.recompute_s
        if not is_here:
            link_free = max(link_free, asked)
            began = max(began, link_free + part.ready_s)
            link_free += part.in_s
        is_here = False
        now = began + part.backward_s
        asked = began + part.points[fetch][0] if fetch else begins
    return now


def _peaks(parts: Sequence[LayerEstimate], fetches: Sequence[int], turnaround_bytes: int) -> Peaks:
    """The most that is held for backward at once."""
    forward = backward = held = coming = last = 0
    for index, (part, fetch) in enumerate(zip(parts, fetches, strict=True), 1):
        own = max(part.working_bytes + (0 if fetch else coming), part.points[fetch][1] + coming)
        if index == len(parts):
            last = held + max(own, part.forward_bytes + coming)
        else:
            forward = max(forward, held + part.forward_bytes + coming)
            backward = max(backward, held + own)
        held += part.held_bytes
        coming = part.sent_bytes
    if turnaround_bytes:
        last = max(last, held + sum(part.sent_bytes for part in parts[-2:]) + turnaround_bytes)
    return Peaks(forward, last, backward)
