"""Which layers are kept, recomputed or sent off, and which of their operations: the plan of `save="auto"`.

A pure function of measured times and sizes, without torch: `make_plan` searches among plans, `predict` plays one step of a plan
through and says how long it takes and how much device memory it needs at most.

Note [the step that is played through]
Three things take turns or run side by side: the device computes, one direction of the link sends, the other fetches.
*Forward.* A layer's input leaves when the layer begins, the result of an operation when it has run; the link sends them in
order. A layer begins once what the layer two before it sent has left.
*Backward.* Layers come in reverse order. A layer's bytes are asked for while the layer behind it runs: after half of that
layer's backward, when its widest part has given its memory back, or with `fetch_early` when its backward begins. Recomputation
goes as far as what has arrived lets it; a saved operation takes no time in it. What the last layer sent is still there.
*Memory* for backward, above weights and gradients: what kept layers and operations hold on the device, what is on its way,
and what the layer at work needs for itself. The peak stands where backward is in one of the last layers, or in the widest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Operation:
    """An operation of a layer whose result can be saved, so that recomputation need not run it.

    Args:
        name: of it, for people.
        at: where in the layer's forward it ends, as a share of the time of that, in [0, 1].
        seconds: to run it again.
        nbytes: of its result and of what its backward reads beside its arguments.
    """

    name: str
    at: float
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs.

    Args:
        forward_s, backward_s: time of either, without recomputation [s].
        recompute_s: time of recomputing all that backward needs, the operations among it [s].
        boundary_bytes: of its inputs that leave, or stay where `boundary_leaves` is False.
        saved_bytes: all that plain autograd keeps of it.
        working_bytes: that its backward holds at most where it was recomputed, what it recomputes included.
        late_bytes: the same in the second half of it.
        operations: in the order in which they run.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    boundary_bytes: int
    saved_bytes: int
    working_bytes: int
    late_bytes: int
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What there is to spend.

    Args:
        out_bytes_per_s, in_bytes_per_s: of the link from the device and to it, while training computes.
        device_bytes: that may be held for backward at once, above weights, gradients and optimizer states.
        host_bytes: off the device; None: no limit.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    device_bytes: int
    host_bytes: int | None = None


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer.

    Args:
        keep: all that autograd saves stays on the device, and nothing is recomputed.
        on_device: which operations' results stay on the device.
        off_device: which operations' results leave it.
    """

    keep: bool = False
    on_device: frozenset[int] = frozenset()
    off_device: frozenset[int] = frozenset()


MIN_GAIN = 1e-4  # of the step's time, for which a plan is worth being changed


class Prediction(NamedTuple):
    """One step of a plan: its time, that in which compute waits for the link, the peak, and what lies off the device."""

    step_s: float
    stall_s: float
    peak_bytes: int
    host_bytes: int


class Plan(NamedTuple):
    """A choice for each layer, when they are fetched, and what is expected of it."""

    layers: tuple[LayerPlan, ...]
    fetch_early: bool
    prediction: Prediction


def held_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """What a layer holds on the device from forward to backward."""
    if plan.keep:
        return cost.saved_bytes
    return sum(cost.operations[i].nbytes for i in plan.on_device)


def sent_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """What of a layer leaves the device."""
    if plan.keep:
        return 0
    return cost.boundary_bytes + sum(cost.operations[i].nbytes for i in plan.off_device)


def predict(costs: Sequence[LayerCost], layers: Sequence[LayerPlan], fetch_early: bool, machine: Machine) -> Prediction:
    """Plays one step through (Note [the step that is played through]).

    Args:
        costs, layers: of each layer, from the first to the last.
        fetch_early: see there.
        machine: link and budgets; the budgets are not looked at.
    """
    forward_s, leaving = _forward(costs, layers, machine)
    step_s = _backward(costs, layers, fetch_early, machine, forward_s)
    busy_s = sum(
        cost.forward_s + cost.backward_s + recompute_s(cost, plan) for cost, plan in zip(costs, layers, strict=True)
    )
    return Prediction(
        step_s,
        step_s - busy_s,
        _peak(costs, layers, fetch_early, [left > forward_s for left in leaving]),
        sum(sent_bytes(cost, plan) for cost, plan in zip(costs, layers, strict=True)),
    )


def recompute_s(cost: LayerCost, plan: LayerPlan) -> float:
    """Time in which a layer's recomputation computes."""
    if plan.keep:
        return 0.0
    return cost.recompute_s - sum(cost.operations[i].seconds for i in plan.on_device | plan.off_device)


def _forward(costs: Sequence[LayerCost], layers: Sequence[LayerPlan], machine: Machine) -> tuple[float, list[float]]:
    """When forward ends, and for each layer when all that it sends has left."""
    now, link_free = 0.0, 0.0
    leaving: list[float] = []
    for index, (cost, plan) in enumerate(zip(costs, layers, strict=True)):
        if index > 1:
            now = max(now, leaving[index - 2])
        for at, nbytes in _sent(cost, plan):
            link_free = max(link_free, now + at * cost.forward_s) + nbytes / machine.out_bytes_per_s
        now += cost.forward_s
        leaving.append(link_free)
    return now, leaving


def _sent(cost: LayerCost, plan: LayerPlan) -> list[tuple[float, int]]:
    """Place and size of what leaves, in order."""
    if plan.keep:
        return []
    ops = [(cost.operations[i].at, cost.operations[i].nbytes) for i in sorted(plan.off_device)]
    return [(0.0, cost.boundary_bytes), *ops]


def _backward(
    costs: Sequence[LayerCost], layers: Sequence[LayerPlan], fetch_early: bool, machine: Machine, now: float
) -> float:
    """When backward ends that begins now."""
    link_free = asked = now
    for index in reversed(range(len(costs))):
        cost, plan = costs[index], layers[index]
        began = now
        if plan.keep:
            now += cost.backward_s
        else:
            is_here = index == len(costs) - 1
            now = _recompute(cost, plan, machine, now, now if is_here else max(link_free, asked), is_here)
            if not is_here:
                link_free = max(link_free, asked) + sent_bytes(cost, plan) / machine.in_bytes_per_s
            began, now = now, now + cost.backward_s
        asked = began if fetch_early else (began + now) / 2
    return now


def _recompute(
    cost: LayerCost, plan: LayerPlan, machine: Machine, now: float, link_free: float, is_here: bool
) -> float:
    """When the recomputation of a layer ends that begins now and whose bytes come from `link_free` on."""
    saved = plan.on_device | plan.off_device
    rest_s = cost.recompute_s - sum(op.seconds for op in cost.operations)
    arrived = link_free + cost.boundary_bytes / machine.in_bytes_per_s
    now = now if is_here else max(now, arrived)
    last = 0.0
    for i, op in enumerate(cost.operations):
        now += max(0.0, rest_s) * (op.at - last)
        last = op.at
        if i not in saved:
            now += op.seconds
        elif i in plan.off_device and not is_here:
            arrived += op.nbytes / machine.in_bytes_per_s
            now = max(now, arrived)
    return now + max(0.0, rest_s) * (1 - last)


def _peak(
    costs: Sequence[LayerCost], layers: Sequence[LayerPlan], fetch_early: bool, is_leaving: Sequence[bool]
) -> int:
    """The most that is held for backward at once; `is_leaving` of the layers whose bytes are on their way when it begins."""
    below = [0]
    for cost, plan in zip(costs, layers, strict=True):
        below.append(below[-1] + held_bytes(cost, plan))
    peak = 0
    for index, (cost, plan) in enumerate(zip(costs, layers, strict=True)):
        own = max(cost.working_bytes, cost.saved_bytes) if plan.keep else cost.working_bytes
        coming = sent_bytes(costs[index - 1], layers[index - 1]) if index else 0
        early = coming if fetch_early or (index == len(costs) - 1 and index and is_leaving[index - 1]) else 0
        peak = max(peak, below[index] + own + early, below[index] + cost.late_bytes + coming)
    return peak


def make_plan(costs: Sequence[LayerCost], machine: Machine) -> Plan:
    """The fastest plan found within the budgets.

    For every number of layers that are kept whole, spread evenly, it starts from the other layers' inputs alone off the
    device, which needs the least memory, and adds what saves the most time: first operations that leave, as long as the
    link has room, then operations that stay, as long as the device has; each for as many layers as it helps, in turn until
    nothing helps any more. Where every layer fits nothing leaves.

    Args:
        costs: of each layer.
        machine: link and budgets. Where even the layers' inputs alone exceed the budgets that plan comes back all the same.
    """
    kept = _planned(costs, [LayerPlan(keep=True)] * len(costs), False, machine)
    if _fits(kept, machine):
        return kept
    best = _with_kept(costs, machine, 0)
    # The more is kept the more is saved, until the memory is missed elsewhere: halve the steps around the best number.
    at, step = 0, max(1, len(costs) // 4)
    while step:
        found = [
            (plan, n) for n in (at - step, at + step) if 0 < n < len(costs) and (plan := _with_kept(costs, machine, n))
        ]
        plan, n = min(found, key=lambda pair: _seconds(pair[0]), default=(best, at))
        if _fits(plan, machine) and _seconds(plan) < _seconds(best):
            best, at = plan, n
        else:
            step //= 2
    return best


def _with_kept(costs: Sequence[LayerCost], machine: Machine, count: int) -> Plan:
    """The fastest plan found in which so many layers are kept."""
    kept = _spread(range(len(costs)), count)
    best = _planned(costs, [LayerPlan(keep=i in kept) for i in range(len(costs))], False, machine)
    operations = range(max(len(cost.operations) for cost in costs))
    for places in ("off_device", "on_device"):
        while True:
            found = min((_improved(best, costs, machine, places, i) for i in operations), key=_seconds, default=best)
            early = _planned(costs, found.layers, True, machine)
            if _fits(early, machine) and _seconds(early) < _seconds(found):
                found = early
            if _seconds(found) >= _seconds(best) * (1 - MIN_GAIN):
                break
            best = found
    return best


def _improved(plan: Plan, costs: Sequence[LayerCost], machine: Machine, place: str, operation: int) -> Plan:
    """The plan with an operation saved in as many more layers, spread evenly, as make it fastest within the budgets."""
    open_layers = [
        i
        for i, (cost, layer) in enumerate(zip(costs, plan.layers, strict=True))
        if not layer.keep and operation < len(cost.operations) and operation not in getattr(layer, place)
    ]
    best = plan
    for share in range(1, len(open_layers) + 1):
        count = len(open_layers) // share
        layers = list(plan.layers)
        for i in _spread(open_layers, count):
            layers[i] = _saving(layers[i], place, operation)
        tried = _planned(costs, layers, plan.fetch_early, machine)
        if _fits(tried, machine) and _seconds(tried) < _seconds(best):
            best = tried
    return best


def _saving(layer: LayerPlan, place: str, operation: int) -> LayerPlan:
    other = "on_device" if place == "off_device" else "off_device"
    return replace(layer, **{place: getattr(layer, place) | {operation}, other: getattr(layer, other) - {operation}})


def _spread(items: Sequence[int], count: int) -> set[int]:
    """So many of the items, evenly spread."""
    return {items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count)}


def _planned(costs: Sequence[LayerCost], layers: Iterable[LayerPlan], fetch_early: bool, machine: Machine) -> Plan:
    chosen = tuple(layers)
    return Plan(chosen, fetch_early, predict(costs, chosen, fetch_early, machine))


def _fits(plan: Plan, machine: Machine) -> bool:
    has_room = machine.host_bytes is None or plan.prediction.host_bytes <= machine.host_bytes
    return has_room and plan.prediction.peak_bytes <= machine.device_bytes


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_s
