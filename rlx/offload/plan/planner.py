"""Which layers are kept, recomputed or sent off, and which of their operations: the plan of `save="auto"`.

A pure function of measured times and sizes, without torch: `make_plan` searches among plans with `predict` of `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from math import inf
from typing import Literal, NamedTuple

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan
from rlx.offload.plan.step import (
    LayerEstimate,
    Prediction,
    assign_tiers,
    choose_fetch_points,
    compute_s,
    estimate_layer,
    simulate,
)

KEPT = LayerPlan(keep=True)
MIN_GAIN = 3e-4  # of the step's time, for which a plan is worth being changed
_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the layers that are kept where a search begins


class Plan(NamedTuple):
    """A choice for each layer, and what is expected of it.

    Args:
        layers: the choice.
        fetches: at which of its `LayerCost.fetch_points` a layer's backward asks for what the layer before has sent.
        prediction: what is expected.
    """

    layers: tuple[LayerPlan, ...]
    fetches: tuple[int, ...]
    prediction: Prediction


def make_plan(costs: Sequence[LayerCost], machine: Budget, begin: Sequence[LayerPlan] | None = None) -> Plan:
    """The fastest plan found within the budgets.

    Where every layer fits nothing leaves. Else it begins with the layers' inputs alone off the device, which needs the least
    memory, some of the layers kept whole or none, and changes what saves the most time: first what leaves, as long as the
    link has room, then anything; each for as many layers of a kind as it helps, in turn until nothing helps any more. The best
    of these is changed by two things at a time as well, where neither alone fits or saves time.

    Args:
        costs: of each layer.
        machine: link and budgets. Inputs that host and disk have no room for stay on the device. Where even so the device's
            budget is exceeded, the plan needs no more than that.
        begin: begin with this alone if it keeps to the budgets: sooner done.
    """
    search = _Search(costs, machine)
    kept = search.state([KEPT] * len(costs))
    found = kept if search.fits(kept) else search.refined(min(search.found(begin), key=_seconds))
    parts = [choice.part for choice in found.layers]
    fetches = choose_fetch_points(parts, search.machine.device_bytes)
    return Plan(tuple(choice.plan for choice in found.layers), tuple(fetches), found.prediction)


What = Literal["all", "inputs"] | int
Place = Literal["off_device", "on_device", "nowhere"]
PLACES: tuple[Place, ...] = ("off_device", "on_device", "nowhere")


class _Choice:
    """A plan for layers of one kind, what a step needs to know of them under it, and what it can be changed to."""

    def __init__(self, kind: _Kind, plan: LayerPlan) -> None:
        self.plan, self.part = plan, estimate_layer(kind.cost, plan, kind.machine)
        self._kind = kind
        self._moved: dict[tuple[What, Place], _Choice] = {}

    def moved(self, what: What, place: Place) -> _Choice:
        """With a thing elsewhere; itself where that cannot be."""
        found = self._moved.get((what, place))
        if found is None:
            found = self._moved[what, place] = self._kind.choice(_moved(self.plan, what, place))
        return found


class _Kind:
    """Layers of equal cost, and the choices for them that have been looked at."""

    def __init__(self, cost: LayerCost, machine: Budget) -> None:
        self.cost, self.machine = cost, machine
        self.members: list[int] = []
        self._choices: dict[LayerPlan, _Choice] = {}

    def choice(self, plan: LayerPlan) -> _Choice:
        """The one for a plan."""
        return self._choices.get(plan) or self._choices.setdefault(plan, _Choice(self, plan))


_Targets = dict[_Choice, _Choice]  # what choices are changed to
_Neighbours = Callable[[_Kind, Sequence[_Choice]], Iterator[tuple[_Targets, bool]]]


class _State(NamedTuple):
    """A plan while it is searched for."""

    layers: tuple[_Choice, ...]
    prediction: Prediction


class _Search:
    """Plans for the same costs and machine, and what has been worked out for them."""

    def __init__(self, costs: Sequence[LayerCost], machine: Budget) -> None:
        self.machine = machine
        self.count = len(costs)
        kinds: dict[LayerCost, _Kind] = {}
        self.kind_of = [kinds.get(cost) or kinds.setdefault(cost, _Kind(cost, machine)) for cost in costs]
        for index, kind in enumerate(self.kind_of):
            kind.members.append(index)
        self.kinds = list(kinds.values())

    def state(self, plans: Sequence[LayerPlan]) -> _State:
        """Plans of all layers, with what is expected of them."""
        state = self._played([kind.choice(plan) for kind, plan in zip(self.kind_of, plans, strict=True)], inf)
        assert state is not None
        return state

    def fits(self, state: _State) -> bool:
        """Whether it keeps to the budgets."""
        has_room = self.machine.host_bytes is None or state.prediction.host_bytes <= self.machine.host_bytes
        return has_room and state.prediction.peak_bytes <= self.machine.device_bytes

    def found(self, begin: Sequence[LayerPlan] | None) -> Iterator[_State]:
        """The best that is reached from each begin."""
        leanest, leanest_bytes = self._leanest()
        self.machine = replace(self.machine, device_bytes=max(self.machine.device_bytes, leanest_bytes))
        begins = [leanest, [LayerPlan(offload_boundary=False)] * self.count]
        for share in _SHARES:
            kept = _last_of(range(self.count), round(share * self.count))
            begins.append([KEPT if i in kept else plan for i, plan in enumerate(leanest)])
        if begin is not None and self.fits(self.state(begin)):
            begins = [list(begin)]
        for state in map(self.state, begins):
            if self.fits(state):
                yield self._improved(self._improved(state, partial(_moves, ("off_device",))), partial(_moves, PLACES))

    def refined(self, best: _State) -> _State:
        """Changed by two things at a time as well, until nothing helps: one leaves in another's place, say."""
        while True:
            found = self._improved(self._improved(best, _double), partial(_moves, PLACES))
            if found is best:
                return best
            best = found

    def _leanest(self) -> tuple[list[LayerPlan], int]:
        """As many inputs off the device as the host has room for, those of the last layer after all others, and its peak."""
        everyone = range(self.count)
        room = self.machine.host_bytes if self.machine.has_link else 0
        for count in reversed(range(self.count + 1)):
            leave = everyone if count == self.count else _middle_of(everyone[:-1], count)
            plans = [LayerPlan(offload_boundary=i in leave) for i in everyone]
            prediction = self.state(plans).prediction
            if room is None or prediction.host_bytes <= room:
                break
        return plans, prediction.peak_bytes

    def _improved(self, best: _State, neighbours: _Neighbours) -> _State:
        """Changed step by step, each time by what saves the most, until nothing does."""
        while True:
            found = best
            for busy, change in sorted(self._changes(best, neighbours), key=lambda one: one[0]):
                if busy >= _seconds(found):
                    break  # none of the rest can be faster
                changed = self._played(change(), _seconds(found))
                if changed is not None and self.fits(changed):
                    found = changed
            if not _seconds(found) < _seconds(best) * (1 - MIN_GAIN):
                return best
            best = found

    def _played(self, layers: Sequence[_Choice], faster_than: float) -> _State | None:
        """With what is expected of them; None if they take as long as `faster_than` or longer, or do not fit then."""
        parts = assign_tiers([choice.part for choice in layers], self.machine)
        prediction = simulate(parts, self.machine, faster_than)
        return None if prediction is None else _State(tuple(layers), prediction)

    def _changes(self, state: _State, neighbours: _Neighbours) -> Iterator[tuple[float, Callable[[], list[_Choice]]]]:
        """With something of one kind of layers elsewhere, for all of them, half of them, and so on down to one.

        Each with a time that the step takes at least then, where that is less than it takes now. What certainly does not fit
        is left out.
        """
        layers, last = state.layers, self.count - 1
        parts = [choice.part for choice in layers]
        busy_now = sum(map(compute_s, parts))
        # Backward begins when all has left but what the last layer sends.
        leaving_now = busy_now - sum(part.forward_s for part in parts) + sum(part.out_s for part in parts[:-1])
        room = (
            self.machine.device_bytes
            - self.kind_of[last].cost.working_bytes
            - sum(part.held_bytes for part in parts[:-1])
        )
        for kind in self.kinds:
            choices = {layers[i]: None for i in kind.members}
            for targets, stays in neighbours(kind, list(choices)):
                more = {choice: _more(choice.part, found.part) for choice, found in targets.items()}
                able = [i for i in kind.members if layers[i] in targets]
                count = len(able)
                while count:
                    # The last layer holds nothing while another is at work; what leaves is spread to suit the link.
                    chosen = _last_of(able, count) if stays else _middle_of(able, count)
                    busy, leaving, held = busy_now, leaving_now, 0
                    for i in chosen:
                        again_s, out_s, held_bytes = more[layers[i]]
                        busy, leaving = busy + again_s, leaving + again_s
                        if i != last:
                            leaving, held = leaving + out_s, held + held_bytes
                    at_least = max(busy + self.machine.turnaround_s, leaving)
                    if at_least < _seconds(state) and held <= room:
                        yield at_least, partial(_changed, layers, targets, chosen)
                    count //= 2


def _more(before: LayerEstimate, after: LayerEstimate) -> tuple[float, float, int]:
    """What a layer computes again, sends [s] and holds more than before."""
    return (
        after.recompute_s - before.recompute_s,
        after.out_s - before.out_s,
        after.held_bytes - before.held_bytes,
    )


def _moves(places: Sequence[Place], kind: _Kind, choices: Sequence[_Choice]) -> Iterator[tuple[_Targets, bool]]:
    """One thing elsewhere, and whether it stays on the device then."""
    for what in ("all", "inputs", *range(len(kind.cost.operations))):
        for place in places:
            targets = {choice: found for choice in choices if (found := choice.moved(what, place)) is not choice}
            yield targets, place == "on_device"


def _double(kind: _Kind, choices: Sequence[_Choice]) -> Iterator[tuple[_Targets, bool]]:
    """Two things elsewhere, or all as in another layer."""
    things = ("inputs", *range(len(kind.cost.operations)))
    for first, second in combinations(things, 2):
        for places in product(PLACES, repeat=2):
            targets = {}
            for choice in choices:
                middle = choice.moved(first, places[0])
                found = middle.moved(second, places[1])
                if middle is not choice and found is not middle and found is not choice.moved(second, places[1]):
                    targets[choice] = found
            yield targets, "on_device" in places
    for choice in choices:
        yield {other: choice for other in choices if other is not choice}, choice.plan.keep


def _changed(layers: Sequence[_Choice], targets: Mapping[_Choice, _Choice], chosen: Container[int]) -> list[_Choice]:
    return [targets[choice] if i in chosen else choice for i, choice in enumerate(layers)]


def _moved(plan: LayerPlan, what: What, place: Place) -> LayerPlan:
    """A layer's plan with a thing elsewhere; as it was where that cannot be."""
    if what == "all" and place == "on_device":
        return KEPT
    if what == "all":
        return LayerPlan() if plan.keep and place == "nowhere" else plan
    if plan.keep:
        return plan
    if what == "inputs":
        return plan if place == "nowhere" else replace(plan, offload_boundary=place == "off_device")
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


def _seconds(state: _State) -> float:
    return state.prediction.step_s
