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
The last layer can therefore be kept at no price in memory, unless something wider follows it.

Note [a layer as two lines]
What a layer does to the clock is the later of two: it computes without a break from where it begins, or it waits for the
link, which works without a break, and then has left what comes after the piece that it waited for. So each layer is a
handful of numbers, worked out once for each choice (`_Part`), and playing a step through is a few additions a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple


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
    """What one layer costs. Layers with equal costs are planned as one kind, so that a model should have few of them.

    Args:
        forward_s, backward_s: time of either, without recomputation [s].
        recompute_s: time of recomputing all that backward needs, the operations among it [s].
        boundary_bytes: of its inputs, which leave, or stay where `boundary_leaves` is False.
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
        out_bytes_per_s, in_bytes_per_s: of the link from the device and to it, while training computes; 0: there is none.
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
        keep: all that autograd saves stays on the device, and nothing is recomputed. The rest says nothing then.
        boundary_leaves: its inputs leave the device; else they stay.
        on_device: which operations' results stay on the device.
        off_device: which operations' results leave it.
    """

    keep: bool = False
    boundary_leaves: bool = True
    on_device: frozenset[int] = frozenset()
    off_device: frozenset[int] = frozenset()


MIN_GAIN = 3e-4  # of the step's time, for which a plan is worth being changed
_SHARES = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the layers that are kept where a search begins


class Prediction(NamedTuple):
    """One step of a plan: its time, that in which compute waits for the link, the peak, what lies off the device, and forward's time."""

    step_s: float
    stall_s: float
    peak_bytes: int
    host_bytes: int
    forward_s: float


class Plan(NamedTuple):
    """A choice for each layer, when they are fetched, and what is expected of it."""

    layers: tuple[LayerPlan, ...]
    fetch_early: bool
    prediction: Prediction


def held_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """What a layer holds on the device from forward to backward."""
    if plan.keep:
        return cost.saved_bytes
    boundary = 0 if plan.boundary_leaves else cost.boundary_bytes
    return boundary + sum(cost.operations[i].nbytes for i in plan.on_device)


def sent_bytes(cost: LayerCost, plan: LayerPlan) -> int:
    """What of a layer leaves the device."""
    return sum(nbytes for _, nbytes, _ in _sent(cost, plan))


def recompute_s(cost: LayerCost, plan: LayerPlan) -> float:
    """Time in which a layer's recomputation computes."""
    return 0.0 if plan.keep else _recomputed_until(cost, plan, 1.0, len(cost.operations))


def predict(costs: Sequence[LayerCost], layers: Sequence[LayerPlan], fetch_early: bool, machine: Machine) -> Prediction:
    """Plays one step through (Note [the step that is played through]).

    Args:
        costs, layers: of each layer, from the first to the last.
        fetch_early: see there.
        machine: link and budgets; the budgets are not looked at.
    """
    return _play([_part(cost, plan, machine) for cost, plan in zip(costs, layers, strict=True)], fetch_early)


class _Part(NamedTuple):
    """What a step needs to know of one layer (Note [a layer as two lines]).

    Args:
        forward_s, recompute_s, backward_s: compute.
        out_s: the link's time for what leaves.
        left_s: from the layer's begin until all has left, where the link is free.
        in_s: the link's time for what is fetched.
        ready_s: from the fetch's begin until recomputation is over, where the device waits for every piece.
        held_bytes, sent_bytes, working_bytes, late_bytes: memory.
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
    working_bytes: int
    late_bytes: int


def _part(cost: LayerCost, plan: LayerPlan, machine: Machine) -> _Part:
    again_s = recompute_s(cost, plan)
    out_s = left_s = in_s = ready_s = 0.0
    for at, nbytes, end in _sent(cost, plan):
        seconds = _over(nbytes, machine.out_bytes_per_s)
        out_s, left_s = out_s + seconds, max(left_s, at * cost.forward_s) + seconds
        in_s += _over(nbytes, machine.in_bytes_per_s)
        ready_s = max(ready_s, in_s + again_s - _recomputed_until(cost, plan, at, end))
    return _Part(
        forward_s=cost.forward_s,
        recompute_s=again_s,
        backward_s=cost.backward_s,
        out_s=out_s,
        left_s=left_s,
        in_s=in_s,
        ready_s=ready_s,
        held_bytes=held_bytes(cost, plan),
        sent_bytes=sent_bytes(cost, plan),
        working_bytes=max(cost.working_bytes, cost.saved_bytes) if plan.keep else cost.working_bytes,
        late_bytes=cost.late_bytes,
    )


def _sent(cost: LayerCost, plan: LayerPlan) -> list[tuple[float, int, int]]:
    """What leaves, in order: where in forward, how much, and at which operation it is needed again."""
    if plan.keep:
        return []
    pieces = [(cost.operations[i].at, cost.operations[i].nbytes, i) for i in sorted(plan.off_device)]
    return [(0.0, cost.boundary_bytes, 0), *pieces] if plan.boundary_leaves else pieces


def _recomputed_until(cost: LayerCost, plan: LayerPlan, at: float, end: int) -> float:
    """Time of recomputing a layer before its operation `end`: those not saved, and as much of the rest as lies before `at`."""
    saved = plan.on_device | plan.off_device
    rest_s = max(0.0, cost.recompute_s - sum(op.seconds for op in cost.operations))
    return rest_s * at + sum(op.seconds for i, op in enumerate(cost.operations[:end]) if i not in saved)


def _over(nbytes: int, rate: float) -> float:
    return nbytes / rate if rate else inf if nbytes else 0.0


def _play(parts: Sequence[_Part], fetch_early: bool) -> Prediction:
    forward_s, leaving = _forward(parts)
    step_s = _backward(parts, fetch_early, forward_s)
    busy_s = sum(part.forward_s + part.recompute_s + part.backward_s for part in parts)
    return Prediction(
        step_s,
        max(0.0, step_s - busy_s),
        _peak(parts, fetch_early, len(parts) > 1 and leaving[-2] > forward_s),
        sum(part.sent_bytes for part in parts),
        forward_s,
    )


def _forward(parts: Sequence[_Part]) -> tuple[float, list[float]]:
    """When forward ends, and for each layer when all that it sends has left."""
    now = link_free = 0.0
    leaving: list[float] = []
    for index, part in enumerate(parts):
        if index > 1:
            now = max(now, leaving[index - 2])
        link_free = max(link_free + part.out_s, now + part.left_s)
        now += part.forward_s
        leaving.append(link_free)
    return now, leaving


def _backward(parts: Sequence[_Part], fetch_early: bool, now: float) -> float:
    """When backward ends that begins now."""
    link_free = asked = now
    is_here = True
    for part in reversed(parts):
        began = now + part.recompute_s
        if not is_here:
            link_free = max(link_free, asked)
            began = max(began, link_free + part.ready_s)
            link_free += part.in_s
        is_here = False
        now = began + part.backward_s
        asked = began if fetch_early else (began + now) / 2
    return now


def _peak(parts: Sequence[_Part], fetch_early: bool, is_leaving: bool) -> int:
    """The most that is held for backward at once; `is_leaving`: the last but one's bytes are on their way when it begins."""
    peak = held = coming = 0
    for index, part in enumerate(parts, 1):
        early = coming if fetch_early or (is_leaving and index == len(parts)) else 0
        peak = max(peak, held + part.working_bytes + early, held + part.late_bytes + coming)
        held += part.held_bytes
        coming = part.sent_bytes
    return peak


def make_plan(costs: Sequence[LayerCost], machine: Machine) -> Plan:
    """The fastest plan found within the budgets.

    Where every layer fits nothing leaves. Else it begins with the layers' inputs alone off the device, which needs the least
    memory, some of the layers kept whole or none, and changes what saves the most time: first what leaves, as long as the
    link has room, then anything; each for as many layers of a kind as it helps, in turn until nothing helps any more.

    Args:
        costs: of each layer.
        machine: link and budgets. Inputs that the host has no room for stay on the device. Where even so the device's budget
            is exceeded, the plan needs no more than that.
    """
    search = _Search(costs, machine)
    kept = search.planned([LayerPlan(keep=True)] * len(costs), False)
    return kept if search.fits(kept) else min(search.found(), key=_seconds)


What = Literal["all", "inputs"] | int
Place = Literal["off_device", "on_device", "nowhere"]


class _Search:
    """Plans for the same costs and machine, and what has been worked out for them."""

    def __init__(self, costs: Sequence[LayerCost], machine: Machine) -> None:
        self.costs, self.machine = costs, machine
        kinds: dict[LayerCost, list[int]] = {}
        for index, cost in enumerate(costs):
            kinds.setdefault(cost, []).append(index)
        self.kinds = list(kinds.items())
        self.kind_of = {index: kind for kind, (_, members) in enumerate(self.kinds) for index in members}
        self.parts: dict[tuple[int, LayerPlan], _Part] = {}
        self.device_bytes = machine.device_bytes

    def planned(self, layers: Iterable[LayerPlan], fetch_early: bool) -> Plan:
        """The plan with what is expected of it."""
        chosen = tuple(layers)
        return Plan(chosen, fetch_early, _play([self._part(*item) for item in enumerate(chosen)], fetch_early))

    def _part(self, index: int, plan: LayerPlan) -> _Part:
        key = (self.kind_of[index], plan)
        if key not in self.parts:
            self.parts[key] = _part(self.costs[index], plan, self.machine)
        return self.parts[key]

    def fits(self, plan: Plan) -> bool:
        """Whether it keeps to the budgets."""
        has_room = self.machine.host_bytes is None or plan.prediction.host_bytes <= self.machine.host_bytes
        return has_room and plan.prediction.peak_bytes <= self.device_bytes

    def found(self) -> Iterator[Plan]:
        """The best that is reached from each begin."""
        leanest = self._leanest()
        self.device_bytes = max(self.device_bytes, leanest.prediction.peak_bytes)
        begins = [leanest.layers, [LayerPlan(boundary_leaves=False)] * len(self.costs)]
        for share in _SHARES[1:]:
            kept = _last_of(range(len(self.costs)), round(share * len(self.costs)))
            begins.append([LayerPlan(keep=True) if i in kept else p for i, p in enumerate(leanest.layers)])
        for begin in filter(self.fits, (self.planned(layers, False) for layers in begins)):
            yield self._improved(self._improved(begin, ("off_device",)), ("off_device", "on_device", "nowhere"))

    def _leanest(self) -> Plan:
        """As many inputs off the device as the host has room for, and nothing else."""
        everyone = range(len(self.costs))
        for count in reversed(range(len(self.costs) + 1)):
            leave = _middle_of(everyone, count)
            plan = self.planned([LayerPlan(boundary_leaves=i in leave) for i in everyone], False)
            if self.machine.host_bytes is None or plan.prediction.host_bytes <= self.machine.host_bytes:
                break
        return plan

    def _improved(self, best: Plan, places: Sequence[Place]) -> Plan:
        """The plan changed step by step, each time by what saves the most, until nothing does."""
        while True:
            found = min(filter(self.fits, self._changed(best, places)), key=_seconds, default=best)
            other = self.planned(found.layers, not found.fetch_early)
            if self.fits(other) and _seconds(other) < _seconds(found):
                found = other
            if not _seconds(found) < _seconds(best) * (1 - MIN_GAIN):
                return best
            best = found

    def _changed(self, plan: Plan, places: Sequence[Place]) -> Iterator[Plan]:
        """The plan with one thing of one kind of layers elsewhere, for all of them, half of them, and so on down to one."""
        for cost, members in self.kinds:
            for what in ("all", "inputs", *range(len(cost.operations))):
                for place in places:
                    changes = {i: _moved(plan.layers[i], what, place) for i in members}
                    able = [i for i in members if changes[i] != plan.layers[i]]
                    count = len(able)
                    while count:
                        # The last layer holds nothing while another is at work; what leaves is spread to suit the link.
                        chosen = _last_of(able, count) if place == "on_device" else _middle_of(able, count)
                        layers = [changes[i] if i in chosen else p for i, p in enumerate(plan.layers)]
                        yield self.planned(layers, plan.fetch_early)
                        count //= 2


def _moved(plan: LayerPlan, what: What, place: Place) -> LayerPlan:
    """The layer's plan with a thing elsewhere; as it was where that cannot be."""
    if what == "all":
        return {"on_device": LayerPlan(keep=True), "off_device": plan, "nowhere": LayerPlan() if plan.keep else plan}[
            place
        ]
    if plan.keep:
        return plan
    if what == "inputs":
        return plan if place == "nowhere" else replace(plan, boundary_leaves=place == "off_device")
    moved = {
        name: getattr(plan, name) - {what} | ({what} if name == place else set())
        for name in ("on_device", "off_device")
    }
    return replace(plan, **moved)


def _middle_of(items: Sequence[int], count: int) -> set[int]:
    """So many of the items, evenly spread."""
    return {items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count)}


def _last_of(items: Sequence[int], count: int) -> set[int]:
    """So many of the items, evenly spread, the last of them among them."""
    return {items[(k + 1) * len(items) // count - 1] for k in range(count)}


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_s
