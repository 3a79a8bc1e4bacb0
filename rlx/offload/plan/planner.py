"""Search for the plan of `save="auto"`: a pure function of times and sizes that compares plans by simulating their steps."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
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
MIN_GAIN = 3e-4  # the share of the step's time that a change must save
_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the layers that are kept in plans from which the search starts


class Plan(NamedTuple):
    """A plan for all layers, and the prediction of a step with it."""

    layers: tuple[LayerPlan, ...]
    fetches: tuple[int, ...]  # for each layer at which of its `LayerCost.fetch_points` the layer before is fetched
    prediction: Prediction


def make_plan(costs: Sequence[LayerCost], budget: Budget, begin: Sequence[LayerPlan] | None = None) -> Plan:
    """Return the fastest plan found within the budget.

    If all layers fit on the device, they are kept. Else the search starts from several plans. One offloads the inputs of all
    layers, which needs the least memory; one keeps all inputs; the others offload inputs and keep a share of the layers. The
    search improves each plan step by step, by the change that saves the most time: first by offloading more, as long as the link
    has time, then by any change, at last by two changes at a time. A change applies to as many layers of a kind as it helps.

    Inputs that neither host nor disk has room for are kept on the device. If even that exceeds its budget, the plan needs as little
    memory as possible. `begin`: start from this plan alone if it is within the budget, which is faster.
    """
    search = _Search(costs, budget)
    kept = search.state([KEPT] * len(costs))
    found = kept if search.fits(kept) else search.refined(min(search.found(begin), key=_seconds))
    estimates = [choice.estimate for choice in found.layers]
    fetches = choose_fetch_points(estimates, search.budget.device_bytes)
    return Plan(tuple(choice.plan for choice in found.layers), tuple(fetches), found.prediction)


Part = Literal["all", "inputs"] | int  # the whole layer, its inputs, or the operation of that index
Action = Literal["off_device", "on_device", "recompute"]
ACTIONS: tuple[Action, ...] = ("off_device", "on_device", "recompute")


class _Choice:
    """A plan for layers of one kind, its estimate, and the choices that differ from it by one change."""

    def __init__(self, kind: _Kind, plan: LayerPlan) -> None:
        self.plan, self.estimate = plan, estimate_layer(kind.cost, plan, kind.budget)
        self._kind = kind

    def changed(self, part: Part, action: Action) -> _Choice:
        return self._kind.choice(_changed_plan(self.plan, part, action))


class _Kind:
    """Layers of equal cost, and the choices for them that the search has met."""

    def __init__(self, cost: LayerCost, budget: Budget) -> None:
        self.cost, self.budget = cost, budget
        self.members: list[int] = []
        self._choices: dict[LayerPlan, _Choice] = {}

    def choice(self, plan: LayerPlan) -> _Choice:
        return self._choices.get(plan) or self._choices.setdefault(plan, _Choice(self, plan))


_Targets = dict[_Choice, _Choice]  # from a choice to its changed one
_Neighbours = Callable[[_Kind, Sequence[_Choice]], Iterator[tuple[_Targets, bool]]]


class _State(NamedTuple):
    """A plan during the search."""

    layers: tuple[_Choice, ...]
    prediction: Prediction


class _Search:
    """A search with given costs and budget."""

    def __init__(self, costs: Sequence[LayerCost], budget: Budget) -> None:
        self.budget = budget
        self.count = len(costs)
        kinds: dict[LayerCost, _Kind] = {}
        self.kind_of = [kinds.get(cost) or kinds.setdefault(cost, _Kind(cost, budget)) for cost in costs]
        for index, kind in enumerate(self.kind_of):
            kind.members.append(index)
        self.kinds = list(kinds.values())

    def state(self, plans: Sequence[LayerPlan]) -> _State:
        state = self._simulated([kind.choice(plan) for kind, plan in zip(self.kind_of, plans, strict=True)], inf)
        assert state is not None
        return state

    def fits(self, state: _State) -> bool:
        has_room = self.budget.host_bytes is None or state.prediction.host_bytes <= self.budget.host_bytes
        return has_room and state.prediction.peak_bytes <= self.budget.device_bytes

    def found(self, begin: Sequence[LayerPlan] | None) -> Iterator[_State]:
        leanest, leanest_bytes = self._leanest()
        self.budget = replace(self.budget, device_bytes=max(self.budget.device_bytes, leanest_bytes))
        begins = [leanest, [LayerPlan(offload_boundary=False)] * self.count]
        for share in _SHARES:
            kept = _last_of(range(self.count), round(share * self.count))
            begins.append([KEPT if i in kept else plan for i, plan in enumerate(leanest)])
        if begin is not None and self.fits(self.state(begin)):
            begins = [list(begin)]
        for state in map(self.state, begins):
            if self.fits(state):
                offloaded = self._improved(state, partial(_single_changes, ("off_device",)))
                yield self._improved(offloaded, partial(_single_changes, ACTIONS))

    def refined(self, best: _State) -> _State:
        """Improve a state also by two changes at a time, for example offload one result and keep another, until none helps."""
        while True:
            found = self._improved(self._improved(best, _double_changes), partial(_single_changes, ACTIONS))
            if found is best:
                return best
            best = found

    def _leanest(self) -> tuple[list[LayerPlan], int]:
        everyone = range(self.count)
        room = self.budget.host_bytes if self.budget.has_link else 0
        for count in reversed(range(self.count + 1)):
            offloaded = everyone if count == self.count else _middle_of(everyone[:-1], count)
            plans = [LayerPlan(offload_boundary=i in offloaded) for i in everyone]
            prediction = self.state(plans).prediction
            if room is None or prediction.host_bytes <= room:
                break
        return plans, prediction.peak_bytes

    def _improved(self, best: _State, neighbours: _Neighbours) -> _State:
        """Improve a state step by step, each time by the change that saves the most, until none does."""
        while True:
            found = best
            for busy, change in sorted(self._changes(best, neighbours), key=lambda one: one[0]):
                if busy >= _seconds(found):
                    break  # the lower bounds are sorted, so no later change can be faster
                changed = self._simulated(change(), _seconds(found))
                if changed is not None and self.fits(changed):
                    found = changed
            if not _seconds(found) < _seconds(best) * (1 - MIN_GAIN):
                return best
            best = found

    def _simulated(self, layers: Sequence[_Choice], faster_than: float) -> _State | None:
        estimates = assign_tiers([choice.estimate for choice in layers], self.budget)
        prediction = simulate(estimates, self.budget, faster_than)
        return None if prediction is None else _State(tuple(layers), prediction)

    def _changes(self, state: _State, neighbours: _Neighbours) -> Iterator[tuple[float, Callable[[], list[_Choice]]]]:
        """Yield changes that may help, to all layers of a kind, half of them and so on: a bound of the step's time, and the choices."""
        layers, last = state.layers, self.count - 1
        estimates = [choice.estimate for choice in layers]
        busy_now = sum(map(compute_s, estimates))
        # Backward begins once all layers but the last are offloaded.
        link_now = busy_now - sum(one.forward_s for one in estimates) + sum(one.out_s for one in estimates[:-1])
        held_now = sum(one.held_bytes for one in estimates[:-1])
        room = self.budget.device_bytes - self.kind_of[last].cost.working_bytes - held_now
        for kind in self.kinds:
            choices = {layers[i]: None for i in kind.members}
            for targets, keeps in neighbours(kind, list(choices)):
                more = {choice: _more(choice.estimate, found.estimate) for choice, found in targets.items()}
                able = [i for i in kind.members if layers[i] in targets]
                count = len(able)
                while count:
                    # The last layer's memory is free while others run backward. Offloading suits the link if spread evenly.
                    chosen = _last_of(able, count) if keeps else _middle_of(able, count)
                    busy, link, held = busy_now, link_now, 0
                    for i in chosen:
                        again_s, out_s, held_bytes = more[layers[i]]
                        busy, link = busy + again_s, link + again_s
                        if i != last:
                            link, held = link + out_s, held + held_bytes
                    at_least = max(busy + self.budget.loss_s, link)
                    if at_least < _seconds(state) and held <= room:
                        yield at_least, partial(_with_changes, layers, targets, chosen)
                    count //= 2


def _more(before: LayerEstimate, after: LayerEstimate) -> tuple[float, float, int]:
    return after.recompute_s - before.recompute_s, after.out_s - before.out_s, after.held_bytes - before.held_bytes


def _single_changes(
    actions: Sequence[Action], kind: _Kind, choices: Sequence[_Choice]
) -> Iterator[tuple[_Targets, bool]]:
    """Yield every single change, and whether it keeps bytes on the device."""
    for part in ("all", "inputs", *range(len(kind.cost.operations))):
        for action in actions:
            targets = {choice: found for choice in choices if (found := choice.changed(part, action)) is not choice}
            yield targets, action == "on_device"


def _double_changes(kind: _Kind, choices: Sequence[_Choice]) -> Iterator[tuple[_Targets, bool]]:
    """Yield every pair of changes, then every change to another layer's plan; each as `_single_changes` does."""
    things = ("inputs", *range(len(kind.cost.operations)))
    for first, second in combinations(things, 2):
        for actions in product(ACTIONS, repeat=2):
            targets = {}
            for choice in choices:
                middle = choice.changed(first, actions[0])
                found = middle.changed(second, actions[1])
                if middle is not choice and found is not middle and found is not choice.changed(second, actions[1]):
                    targets[choice] = found
            yield targets, "on_device" in actions
    for choice in choices:
        yield {other: choice for other in choices if other is not choice}, choice.plan.keep


def _with_changes(layers: Sequence[_Choice], targets: _Targets, chosen: Container[int]) -> list[_Choice]:
    return [targets[choice] if i in chosen else choice for i, choice in enumerate(layers)]


def _changed_plan(plan: LayerPlan, part: Part, action: Action) -> LayerPlan:
    if part == "all" and action == "on_device":
        return KEPT
    if part == "all":
        return LayerPlan() if plan.keep and action == "recompute" else plan
    if plan.keep:
        return plan
    if part == "inputs":
        return plan if action == "recompute" else replace(plan, offload_boundary=action == "off_device")
    places = ("on_device", "off_device")
    return replace(plan, **{n: getattr(plan, n) - {part} | ({part} if n == action else set()) for n in places})


def _middle_of(items: Sequence[int], count: int) -> set[int]:
    return {items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count)}


def _last_of(items: Sequence[int], count: int) -> set[int]:
    return {items[(k + 1) * len(items) // count - 1] for k in range(count)}


def _seconds(state: _State) -> float:
    return state.prediction.step_s
