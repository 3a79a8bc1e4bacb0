"""Which layers are kept, recomputed or sent off, and which of their operations: the plan of `save="auto"`.

A pure function of measured times and sizes, without torch: `make_plan` searches among plans with `predict` of `step.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from rlx.offload.plan.step import LayerCost, LayerPlan, Machine, Part, Prediction, part_of, play

MIN_GAIN = 3e-4  # of the step's time, for which a plan is worth being changed
_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the layers that are kept where a search begins


class Plan(NamedTuple):
    """A choice for each layer, when they are fetched, and what is expected of it."""

    layers: tuple[LayerPlan, ...]
    fetch_early: bool
    prediction: Prediction


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
        self.parts: dict[tuple[int, LayerPlan], Part] = {}
        self.device_bytes = machine.device_bytes

    def planned(self, layers: Iterable[LayerPlan], fetch_early: bool) -> Plan:
        """The plan with what is expected of it."""
        chosen = tuple(layers)
        return Plan(chosen, fetch_early, play([self.part(*item) for item in enumerate(chosen)], fetch_early))

    def part(self, index: int, plan: LayerPlan) -> Part:
        key = (self.kind_of[index], plan)
        if key not in self.parts:
            self.parts[key] = part_of(self.costs[index], plan, self.machine)
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
        for share in _SHARES:
            kept = _last_of(range(len(self.costs)), round(share * len(self.costs)))
            begins.append([LayerPlan(keep=True) if i in kept else p for i, p in enumerate(leanest.layers)])
        for begin in filter(self.fits, (self.planned(layers, False) for layers in begins)):
            yield self._improved(self._improved(begin, ("off_device",)), ("off_device", "on_device", "nowhere"))

    def _leanest(self) -> Plan:
        """As many inputs off the device as the host has room for, those of the last layer after all others, and nothing else."""
        everyone = range(len(self.costs))
        room = self.machine.host_bytes if self.machine.out_bytes_per_s and self.machine.in_bytes_per_s else 0
        for count in reversed(range(len(self.costs) + 1)):
            leave = everyone if count == len(everyone) else _middle_of(everyone[:-1], count)
            plan = self.planned([LayerPlan(boundary_leaves=i in leave) for i in everyone], False)
            if room is None or plan.prediction.host_bytes <= room:
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
    if what == "all" and place == "on_device":
        return LayerPlan(keep=True)
    if what == "all":
        return LayerPlan() if plan.keep and place == "nowhere" else plan
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
