"""The profile of a pass: the cost of each kind of layer, on one rank or as the largest figures of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from rlx.offload.autotune.layer_profile import LayerProfile
from rlx.offload.plan.costs import LayerCost, LayerPlan, Operation, Point
from rlx.offload.replay.dataflow import Dataflow
from rlx.offload.replay.dead_ops import DeadOpCheck
from rlx.offload.replay.instructions import LayerInstructions

# Part of the cache key, so that a run does not read profiles with another meaning. Raise it when the same layers on the same
# machine would get other figures (by a change in `layer_profile.py`, `op_profile.py`, `profiler.py` or here), and when the fields
# of `PassProfile` or of a class inside it change.
PROFILE_VERSION = 5

_SMALL = 256  # results at least this many times smaller than their layer's largest are kept, if other operations are dead then
_MAX_OPERATIONS = 12  # planned for each layer, the slowest first; more would make the search slow
_T = TypeVar("_T")
_LESS = 0.98  # a fetch point is used if backward holds less than this share of the memory held before it


class LayerKind(NamedTuple):
    """Layers that run the same operations, and the cost of one of them. Op indices: Note [op indices] in `instructions.py`."""

    members: tuple[int, ...]  # indices of the layers
    names: tuple[str, ...]  # of the calls that all of them make, up to the first that differs
    cost: LayerCost  # mean of the layers; its operations are those whose results can be cached
    flow: Dataflow | None = None  # which operation reads which result; None: not known
    small: tuple[int, ...] = ()  # op indices of small results that are kept on the device to make other operations dead

    def instructions(
        self, layer: LayerPlan, fetch: int, checks: dict[tuple[int, frozenset[int]], DeadOpCheck]
    ) -> LayerInstructions:
        """Return a layer's instructions, from its plan and the index of its fetch point. Adds missing `checks`."""
        point = self.cost.fetch_points[fetch]
        operations = self.cost.operations
        instructions = LayerInstructions(
            keep=layer.keep,
            offload_boundary=layer.offload_boundary,
            on_device=frozenset(operations[i].op for i in layer.on_device).union(self.small),
            off_device=frozenset(operations[i].op for i in layer.off_device),
            call_names=self.names,
            prefetch_early=fetch == 0,
            prefetch_call=point.call if point.call >= 0 else None,
            prefetch_below=point.slots if point.call >= 0 else None,
            saved_bytes=self.cost.saved_bytes,
        )
        if self.flow is None or layer.keep:
            return instructions
        dead_ops = self.flow.dead_ops(instructions.cached_ops)
        check = checks.setdefault((self.members[0], dead_ops), DeadOpCheck()) if dead_ops else None
        return replace(
            instructions,
            dead_ops=dead_ops,
            other_names=self.flow.other_names,
            dead_op_reads=self.flow.reads_of(dead_ops),
            check=check,
        )


class PassProfile(NamedTuple):
    """The profile of one pass."""

    kinds: tuple[LayerKind, ...]  # of its layers
    loss_bytes: int  # peak memory between forward and backward of the layers, while the head and the loss run
    loss_s: float = 0.0  # time of the head and the loss


def measured(layers: Sequence[LayerProfile], loss_bytes: int, loss_s: float = 0.0) -> PassProfile:
    """Return the profile of a pass. Layers are of one kind if they call the same linear maps and the same kind of attention."""
    groups: dict[tuple[object, ...], list[LayerProfile]] = {}
    for layer in layers:
        # Equal calls count once: the router decides how many experts a layer calls.
        calls = tuple(dict.fromkeys((call.name, call.variant) for call in layer.calls))
        groups.setdefault((layer.inputs.boundary_bytes, calls), []).append(layer)
    return PassProfile(tuple(map(_kind, groups.values())), loss_bytes, loss_s)


def slowest(measurements: Sequence[PassProfile]) -> PassProfile:
    """Return the longest times and most bytes of each kind; ranks with other layers than the first rank are ignored."""
    first = [kind.members for kind in measurements[0].kinds]
    alike = [m for m in measurements if [kind.members for kind in m.kinds] == first]
    kinds = zip(*(m.kinds for m in alike), strict=True)
    loss_bytes, loss_s = max(m.loss_bytes for m in alike), max(m.loss_s for m in alike)
    return PassProfile(tuple(map(_slowest, kinds)), loss_bytes, loss_s)


def planned(kind: LayerKind) -> LayerKind:
    """Return the kind with its slowest operations only, at most `_MAX_OPERATIONS`."""
    operations = kind.cost.operations
    slowest_ones = sorted(operations, key=lambda one: -one.seconds)[:_MAX_OPERATIONS]
    return kind._replace(cost=replace(kind.cost, operations=tuple(one for one in operations if one in slowest_ones)))


def _kind(members: Sequence[LayerProfile]) -> LayerKind:
    timed: Sequence[LayerProfile] = [layer for layer in members if not layer.is_host_bound]
    if all(layer.backward_s is None for layer in timed):
        timed = members
    names: list[str] = []
    operations: dict[int, Operation] = {}
    for op, calls in enumerate(zip(*(layer.calls for layer in members), strict=False)):
        if len({call.name for call in calls}) > 1:
            break
        names.append(calls[0].name)
        if all(call.is_cacheable for call in calls):
            operations[op] = _operation(timed, op)
    flow = members[0].flow if all(layer.flow == members[0].flow for layer in members) else None
    others: dict[int, Operation] = {}
    if flow is not None and len(names) == len(members[0].calls):
        for index, calls in enumerate(zip(*(layer.others for layer in members), strict=True)):
            if all(call.is_cacheable and call.recomputed is not None for call in calls):
                others[-1 - index] = _operation(timed, -1 - index)
    operations, small, saved_s = shortened(flow, operations, others) if others and flow else (operations, (), 0.0)
    forward_s = fmean(layer.forward_s for layer in timed)
    middles = [layer.late_at for layer in timed if layer.late_at is not None]
    backwards = [layer.backward_s for layer in timed if layer.backward_s is not None]
    boundary = members[0].inputs.boundary_bytes
    saved = round(fmean(layer.saved_bytes for layer in members))
    working = [s.working_bytes for s in members if s.working_bytes and s.late_bytes is not None]
    late = [s.late_bytes for s in members if s.working_bytes and s.late_bytes]
    working_bytes = max(working) if late else saved + 2 * boundary
    points = _points(members, timed, len(names), working_bytes) if late else ()
    # Without figures of an allocator, `working_bytes` and `late_bytes` are the saved tensors, or half of them, and two gradients.
    cost = LayerCost(
        forward_s=forward_s,
        backward_s=fmean(backwards) if backwards else 2 * forward_s,
        recompute_s=max(0.0, fmean(layer.recompute_s for layer in timed) - saved_s),
        boundary_bytes=boundary,
        saved_bytes=saved,
        working_bytes=working_bytes,
        late_bytes=max(late) if late else saved // 2 + 2 * boundary,
        operations=tuple(operations.values()),
        late_at=fmean(middles) if middles else 0.5,
        forward_bytes=max(layer.forward_bytes for layer in members),
        points=points,
        extra_bytes=max(layer.extra_bytes for layer in members),
        kept_bytes=_kept_bytes(members, points, working_bytes) if late else 0,
    )
    indices = tuple(layer.index for layer in members)
    return LayerKind(indices, tuple(names), cost, flow if others else None, small)


def _operation(members: Sequence[LayerProfile], op: int) -> Operation:
    calls = [layer.calls[op] if op >= 0 else layer.others[-1 - op] for layer in members]
    return Operation(
        name=calls[0].name,
        at=fmean(layer.ends_at(call) for layer, call in zip(members, calls, strict=True)),
        seconds=fmean(call.recompute_s for call in calls),
        nbytes=round(fmean(call.nbytes for call in calls)),
        offload_at=fmean(layer.stored_at(call) for layer, call in zip(members, calls, strict=True)),
        small_bytes=round(fmean(call.small_bytes for call in calls)),
        extra_bytes=round(fmean(call.extra_bytes for call in calls)),
        op=op,
    )


def shortened(
    flow: Dataflow, calls: Mapping[int, Operation], others: Mapping[int, Operation]
) -> tuple[dict[int, Operation], tuple[int, ...], float]:
    """Return operations with the time that keeping each result saves, dead operations included.

    Another operation replaces a call if the call is dead once the other's result is cached, and if that result is no larger. For
    example, rotated queries replace queries. Small results that make other operations dead are always kept.

    Args:
        flow: of the layer.
        calls, others: operations whose results can be cached, by op index.

    Returns:
        The operations in the order in which they run, each with the time of all operations that need not run if it is cached.
        The op indices of the small results, and the time of their operations and of those that are dead because of them [s].
    """
    everything = {**calls, **others}

    def seconds(ops: Iterable[int]) -> float:
        return sum(everything[op].seconds for op in ops if op in everything)

    largest = max(operation.nbytes for operation in everything.values())
    small = {op for op, one in others.items() if one.nbytes * _SMALL <= largest and flow.dead_ops({op})}
    for op in sorted(small, reverse=True):  # the mean of squares is dead once its sum with epsilon is kept
        if op in flow.dead_ops(small - {op}):
            small.remove(op)
    base = flow.dead_ops(small)
    left_out = {op: flow.dead_ops({*small, op}) - base for op in everything if op not in base}
    gained = {op: seconds({op, *out}) for op, out in left_out.items()}
    found: dict[int, Operation] = {}
    for call, operation in calls.items():
        rivals = [p for p in others if p not in small and p not in base and call in left_out[p]]
        rivals = [p for p in rivals if others[p].nbytes <= operation.nbytes]
        best = max((call, *rivals), key=lambda op: gained[op]) if call not in base else None
        if best is not None:
            found[best] = replace(everything[best], name=operation.name, seconds=gained[best])
    order = [node.op for node in flow.nodes]
    ordered = {op: found[op] for op in sorted(found, key=order.index)}
    return ordered, tuple(sorted(small)), seconds(base | small)


def _points(
    members: Sequence[LayerProfile], timed: Sequence[LayerProfile], calls: int, working_bytes: int
) -> tuple[Point, ...]:
    """Return the fetch points, the last call first: the backward of a call begins, and less memory is held than before."""
    seen = [layer for layer in members if layer.backward_s is not None]
    thresholds = [set(layer.thresholds) for layer in seen]
    points: list[Point] = []
    for op, call in reversed(list(enumerate(members[0].calls[:calls]))):
        threshold, held = call.slots, points[-1].nbytes if points else working_bytes
        is_everywhere = all(threshold in passed for passed in thresholds)
        if not is_everywhere or any(layer.calls[op].slots != threshold for layer in members):
            continue
        nbytes = max(layer.held_from(threshold) for layer in seen)
        if nbytes < _LESS * held:
            at = fmean(layer.reaches(threshold) for layer in timed if layer.backward_s is not None)
            ends_at = fmean(layer.ends_at(layer.calls[op]) for layer in timed)  # as an operation's
            points.append(Point(at, nbytes, call.name, op, threshold, ends_at))
    return tuple(points)


def _kept_bytes(members: Sequence[LayerProfile], points: Sequence[Point], working_bytes: int) -> int:
    """Return the peak memory of backward if the layer is not recomputed: each call then holds its `summed_bytes`, too."""
    most, held = working_bytes, {point.call: point.nbytes for point in points}
    at_call = working_bytes
    for op in reversed(range(max(len(layer.calls) for layer in members))):
        at_call = held.get(op, at_call)
        most = max(most, at_call + max(s.calls[op].summed_bytes for s in members if op < len(s.calls)))
    return most


def _slowest(ranks: Sequence[LayerKind]) -> LayerKind:
    first = ranks[0]
    is_same = all((kind.flow, kind.small) == (first.flow, first.small) for kind in ranks)
    names = list(zip(*(kind.names for kind in ranks), strict=False))
    count = next((i for i, called in enumerate(names) if len(set(called)) > 1), len(names))
    operations = []
    for same in _in_all([{one.op: one for one in kind.cost.operations} for kind in ranks]):
        if 0 <= same[0].op < count or is_same:
            operations.append(Operation(same[0].name, **_most(same, besides=("name",))))
    costs = [kind.cost for kind in ranks]
    points = _same_points(costs, count)
    cost = LayerCost(**_most(costs, ("operations", "points")), operations=tuple(operations), points=points)
    flow, small = (first.flow, first.small) if is_same else (None, ())
    return LayerKind(first.members, first.names[:count], cost, flow, small)


def _same_points(ranks: Sequence[LayerCost], calls: int) -> tuple[Point, ...]:
    """Return the points that all ranks have, with the latest time and the most bytes of any rank."""
    points = []
    for same in _in_all([{(point.call, point.slots): point for point in cost.points} for cost in ranks]):
        if same[0].call < calls:
            forward_at = min((point.forward_at for point in same if point.forward_at is not None), default=None)
            at, nbytes = max(point.at for point in same), max(point.nbytes for point in same)
            points.append(same[0]._replace(at=at, nbytes=nbytes, forward_at=forward_at))
    return tuple(points)


def _in_all(ranks: Sequence[Mapping[Any, _T]]) -> list[list[_T]]:
    """Return for each key that all ranks have their values, in the first rank's order."""
    return [[values[key] for values in ranks] for key in ranks[0] if all(key in values for values in ranks)]


def _most(figures: Sequence[Operation] | Sequence[LayerCost], besides: Sequence[str]) -> dict[str, Any]:
    """Return the largest value of each field."""
    names = [field.name for field in fields(figures[0]) if field.name not in besides]
    return {name: max(getattr(one, name) for one in figures) for name in names}
