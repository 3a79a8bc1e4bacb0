"""Measures layers for `save="auto"`: the times, bytes and operations of one pass, and the cost of each kind of layer in it.

A measured layer runs as with `save="boundary"`. Times come from device events, bytes from torch's allocator, whose peak is reset at
each layer.

Note [what a layer is charged with]
A budget limits the memory that a step adds to what exists before its layers begin, apart from the gradients it makes. A layer is
charged with its own peak and with other memory of that moment that no plan can change: rotary tables and masks, the first layer's
inputs if the model keeps them, head and loss, and the gradient of the layer's output; not with inputs of other layers in flight.

Note [what FSDP2 holds during a step]
In the backward of a layer FSDP2 holds the gathered parameters of the layer and of the layer before, the layer's gradients before they
are reduced, and the buffer that reduces those of the layer after it. A budget must cover all of it. Parameters of the first layer are
gathered before that layer begins, so they are subtracted from the memory that exists before it. The last layer has no such buffer, so
each other layer compares the memory when its backward begins with that of the last layer. Gradients of gathered parameters are charged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rlx.offload.plan.costs import LayerCost, LayerPlan, Operation, Point
from rlx.offload.recompute.checkpoint import RecomputedCall, Run
from rlx.offload.recompute.saved_inputs import StashedTensor
from rlx.offload.replay.policy import CachedOpPolicy
from rlx.offload.replay.recorder import LayerInstructions, PlannedRecorder, attention_variant, call_name
from rlx.offload.replay.replay_mode import ReplayMode
from rlx.offload.runtime.pytree import tensors_in
from rlx.offload.storage.offloader import Mark, mark
from rlx.offload.storage.tensor_bytes import is_parameter, is_plain, size_bytes, storage_address

_MAX_OPERATIONS = 12  # planned for each layer, the slowest first; more would make the search slow
_LESS = 0.98  # a fetch point is used if backward holds less than this share of the memory held before it


@dataclass
class OpProfile:
    """One call of attention or of a linear map: when it ran, and the size of its result [bytes]."""

    name: str
    variant: str  # of attention: its kind, on which its time depends; else ""
    start: Mark
    stop: Mark | None = None
    stored: Mark | None = None  # when the last tensor of its result may be offloaded
    nbytes: int = 0
    small_bytes: int = 0  # of `nbytes`, in tensors too small to be offloaded
    extra_bytes: int = 0  # of `nbytes`, in tensors that autograd does not save
    summed_bytes: int = 0  # of its input, if its bias requires a gradient
    is_cacheable: bool = False  # its result can be cached
    slots: int = -1  # number of tensors that autograd had saved after it
    recomputed: tuple[Mark, Mark] | None = None  # begin and end in recomputation
    storages: dict[int, int] = field(default_factory=dict)  # of its result, during forward: addresses and bytes

    @property
    def recompute_s(self) -> float:
        """Time in recomputation. It differs from the time in forward, because other kernels run at the same time."""
        assert self.stop is not None
        return seconds(*(self.recomputed or (self.start, self.stop)))


class Inputs(NamedTuple):
    """Sizes of the tensors that a layer is called with [bytes]."""

    boundary_bytes: int  # of all that require a gradient, without parameters
    memory: dict[int, int]  # of the same tensors, by address of the storage
    shared: dict[int, int]  # of the others, likewise: all layers are called with them, so no layer is charged with them

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Inputs:
        own = {id(t): t for t in tensors if t.requires_grad and not is_parameter(t)}.values()
        return cls(
            sum(map(size_bytes, own)),
            {storage_address(t): size_bytes(t) for t in own if is_plain(t)},
            {storage_address(t): size_bytes(t) for t in tensors if not t.requires_grad and is_plain(t)},
        )


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes that torch has allocated on a device, and their peak since the last reset; 0 on the CPU."""
    if device.type == "cpu":
        return 0, 0
    return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)


def capacity_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that torch has or could get, and all bytes of the device; None on the CPU."""
    if device.type == "cpu":
        return None
    free, total = torch.get_device_module(device.type).mem_get_info(device)
    return free + torch.accelerator.memory_reserved(device), total


def is_passed(mark: Mark) -> bool:
    return isinstance(mark, torch.Event) and mark.query()


def seconds(start: Mark, stop: Mark) -> float:
    if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
        return start.elapsed_time(stop) / 1e3
    assert isinstance(start, float) and isinstance(stop, float)
    return (stop - start) / 1e3


@dataclass
class PassState:
    """Figures that the layers of one pass share: the layer whose backward runs, and memory outside of layers."""

    gradient_bytes: Callable[[], int] = lambda: 0  # returns the memory of all existing gradients that outlast the pass
    is_sharded: bool = False  # FSDP2 gathers and frees parameters in the pass (Note [what FSDP2 holds during a step])
    gathered_bytes: int = 0  # memory of the parameters that FSDP2 has gathered when the first layer begins
    pending_bytes: int = 0  # of states that do not exist in the pass
    begun: WeakValueDictionary[int, LayerProfile] = field(default_factory=WeakValueDictionary)  # by index
    called: set[int] = field(default_factory=set)  # indices of the layers that have begun
    done: dict[int, LayerProfile] = field(default_factory=dict)  # those that were recomputed
    in_backward: LayerProfile | None = None
    last_boundary_bytes: int | None = None  # inputs of the layer whose forward began last
    has_begun: bool = False  # backward
    baseline_bytes: int = 0  # allocated when the first layer begins, apart from its inputs and gathered parameters
    other_bytes: int = 0  # memory of no layer when backward begins (Note [what a layer is charged with])
    loss_bytes: int = 0  # peak while the head and the loss run, `other_bytes` included
    begin_gradient_bytes: int = 0
    turn: tuple[Mark, Mark] | None = None  # end of the layers' forward, begin of their backward

    @property
    def loss_s(self) -> float:
        return 0.0 if self.turn is None else seconds(*self.turn)

    @property
    def is_complete(self) -> bool:
        return bool(self.called) and self.done.keys() == self.called

    @property
    def is_alive(self) -> bool:
        """Whether the graph of a layer that was not recomputed is alive."""
        return any(index not in self.done for index in self.begun)

    def made_bytes(self) -> int:
        return self.gradient_bytes() - self.begin_gradient_bytes


@dataclass(eq=False)
class LayerProfile:
    """Profiles one layer call."""

    index: int
    device: torch.device
    inputs: Inputs
    state: PassState
    min_bytes: int = 1  # smaller tensors are not offloaded
    gradient_bytes: Callable[[], int] = lambda: (
        0
    )  # of the layer's parameters, as far as they exist and outlast the pass
    sees_calls: bool = True  # profile each call; else only the begin and end of the layer, which takes the host no time
    is_host_bound: bool = False  # the device may have waited for the host, so that times are the host's
    calls: list[OpProfile] = field(default_factory=list)  # linear maps and attention
    saved_bytes: int = 0
    forward_bytes: int = 0
    extra_bytes: int = 0  # of the inputs that autograd does not save
    working_bytes: int | None = None
    passed: dict[int, tuple[Mark, int]] = field(
        default_factory=dict
    )  # by threshold: when it was passed, peak before it
    _marks: dict[str, Mark] = field(default_factory=dict)
    _base_bytes: int = 0
    _offloading_bytes: int = 0
    # Backward asks for slots in falling order. A threshold is a slot; backward passes it with the first slot below it.
    _thresholds_left: list[int] = field(default_factory=list)
    _middle: int = 0  # the threshold from which on backward fetches
    _rest_bytes: int = 0  # peak memory after the last threshold
    _had_bytes: int = 0  # of the gradients that existed when backward came to the layer
    _made_bytes: int = 0  # of gradients made until the last threshold
    _sharding_bytes: int = 0  # memory of FSDP2, in addition to that when backward began

    def mark(self) -> Mark:
        return mark(None if self.device.type == "cpu" else torch.accelerator.current_stream(self.device))

    def reset_peak(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)

    def begin_forward(self) -> None:
        """The layer's forward begins, and its inputs are being copied out."""
        state = self.state
        if state.last_boundary_bytes is None:
            tables = sum(self.inputs.shared.values())  # they are made in this step, too
            inputs = self.inputs.boundary_bytes + tables
            state.baseline_bytes = max(0, allocated_bytes(self.device)[0] - inputs - state.gathered_bytes)
            state.begin_gradient_bytes = state.gradient_bytes()
        self._offloading_bytes = state.last_boundary_bytes or 0
        state.last_boundary_bytes = self.inputs.boundary_bytes
        self.reset_peak()
        self._marks["forward"] = self.mark()

    def pass_forward(self) -> None:
        self._marks["forward_end"] = self.mark()
        self._note_host_bound("forward")

    def _note_host_bound(self, begin: str) -> None:
        # The host has issued the whole layer. A device that has begun it already may have waited for the host.
        self.is_host_bound = self.is_host_bound or is_passed(self._marks[begin])

    def end_forward(self, saved: Sequence[Tensor], is_cacheable: Sequence[bool]) -> None:
        self.pass_forward()
        for call, can_be in zip(self.calls, is_cacheable, strict=True):
            call.is_cacheable = can_be
        plain = [tensor.untyped_storage() for tensor in saved if is_plain(tensor) and not is_parameter(tensor)]
        storages = {storage.data_ptr(): storage.nbytes() for storage in plain}
        self.saved_bytes = _outside(storages, self.inputs.shared)
        self.extra_bytes = _outside(self.inputs.memory, storages)
        for call in self.calls:
            call.extra_bytes = _outside(call.storages, storages)
            call.storages.clear()
        cached = sum(call.extra_bytes for call in self.calls)  # a profiled layer holds the results of all calls
        others = self.state.baseline_bytes + self._offloading_bytes + cached
        self.forward_bytes = max(0, allocated_bytes(self.device)[1] - others)

    def begin_recompute(self) -> None:
        if "recompute" in self._marks:
            return
        self._marks["recompute"] = now = self.mark()
        state = self.state
        allocated, peak = allocated_bytes(self.device)
        if state.in_backward is not None:
            state.in_backward.end_backward(now, peak)
        elif not state.has_begun:
            inputs = self.inputs.boundary_bytes + self._offloading_bytes
            state.other_bytes = max(0, allocated - state.baseline_bytes - state.made_bytes() - inputs)
            state.loss_bytes = peak - allocated + state.other_bytes
            state.turn = self._marks["forward_end"], now
            allocated = max(0, allocated - self._offloading_bytes)  # backward now waits until they are copied
        if state.has_begun and state.is_sharded:
            others = allocated - state.baseline_bytes - state.made_bytes() - self.inputs.boundary_bytes
            self._sharding_bytes = max(0, others - state.other_bytes)
        state.has_begun = True
        state.in_backward = self
        self._base_bytes, self._had_bytes = allocated, self.gradient_bytes()
        self.reset_peak()

    def end_recompute(self) -> None:
        if "recompute_end" not in self._marks:
            self._marks["recompute_end"] = self.mark()
            self._note_host_bound("recompute")
            if self.index in self.state.begun:  # else the pass was given up
                self.state.done[self.index] = self

    def begin_thresholds(self, prefetch_below: int) -> int:
        """Begin to note thresholds in backward, which fetches below one of them. Return the first threshold."""
        self._middle = middle = prefetch_below
        if not self.passed:
            self._thresholds_left = sorted({middle, *(call.slots for call in self.calls)} - {0, -1}, reverse=True)
        return self._thresholds_left[0] if self._thresholds_left else middle

    def pass_threshold(self, slot: int) -> int:
        """Note that backward asks for a slot below a threshold; return the next threshold, 0 if there is none."""
        if self.state.in_backward is not self:
            return self._middle if slot >= self._middle else 0
        below = [threshold for threshold in self._thresholds_left if slot < threshold]
        if below:
            self.passed[below[-1]] = self.mark(), self._segment(allocated_bytes(self.device)[1])
            self._made_bytes = self.gradient_bytes() - self._had_bytes
            self.reset_peak()
            self._thresholds_left = self._thresholds_left[len(below) :]
        return self._thresholds_left[0] if self._thresholds_left else 0

    def end_backward(self, now: Mark, peak: int) -> None:
        self._marks["backward_end"] = now
        self._rest_bytes = rest = self._segment(peak)
        self.working_bytes = max(rest, 0, *(held for _, held in self.passed.values()))

    def _segment(self, peak: int) -> int:
        """Return the peak since the last threshold. This layer's inputs count; prefetched ones, assumed to be as large, do not."""
        is_fetching = any(threshold <= self._middle for threshold in self.passed)
        charged = peak - self._base_bytes - self._made_bytes + self.state.other_bytes + self._sharding_bytes
        return charged + (0 if is_fetching else self.inputs.boundary_bytes)

    def held_from(self, threshold: int) -> int:
        return max(self._rest_bytes, 0, *(held for at, (_, held) in self.passed.items() if at < threshold))

    def reaches(self, threshold: int) -> float:
        """Return when backward has passed a threshold, as a share of its time, in [0, 1]."""
        share = seconds(self._marks["recompute_end"], self.passed[threshold][0]) / max(self.backward_s or 0.0, 1e-12)
        return min(1.0, share)

    @property
    def is_known(self) -> bool:
        marks = [*self._marks.values(), *(mark for mark, _ in self.passed.values())]
        marks += [mark for call in self.calls for mark in (call.stop, call.stored) if mark is not None]
        return all(isinstance(mark, float) or mark.query() for mark in marks)

    @property
    def forward_s(self) -> float:
        return seconds(self._marks["forward"], self._marks["forward_end"])

    @property
    def recompute_s(self) -> float:
        return seconds(self._marks["recompute"], self._marks["recompute_end"])

    @property
    def backward_s(self) -> float | None:
        """Time of backward without recomputation; None for the first layer, whose end is not seen."""
        end = self._marks.get("backward_end")
        return None if end is None else seconds(self._marks["recompute_end"], end)

    def share_of_forward(self, mark: Mark | None) -> float:
        """Return when the device passed a mark, as a share of forward's time, in [0, 1]."""
        assert mark is not None
        return min(1.0, seconds(self._marks["forward"], mark) / max(self.forward_s, 1e-12))


def _outside(storages: Mapping[int, int], others: Container[int]) -> int:
    return sum(nbytes for address, nbytes in storages.items() if address not in others)


class ProfilingPolicy(CachedOpPolicy):
    """Measures one layer call. Only the layer's inputs are kept, as in boundary mode."""

    def __init__(self, profile: LayerProfile) -> None:
        super().__init__()
        # It reuses no result, but is recomputed as with a plan, which reuses some.
        self.reuses_results = profile.sees_calls
        self._profile = profile
        self.release_forward = profile.reset_peak  # type: ignore[method-assign]
        self.begin_recompute = profile.begin_recompute  # type: ignore[method-assign]
        self.end_recompute = profile.end_recompute  # type: ignore[method-assign]
        self.first_threshold = profile.begin_thresholds  # type: ignore[method-assign]
        self.pass_threshold = profile.pass_threshold  # type: ignore[method-assign]

    def begin_forward(self, recording: RecomputedCall) -> AbstractContextManager[object]:
        return ProfilingRecorder(recording, self._profile) if self._profile.sees_calls else self._timed_forward()

    @contextlib.contextmanager
    def _timed_forward(self) -> Iterator[None]:
        self._profile.begin_forward()
        yield
        self._profile.pass_forward()

    def end_forward(self, context: Any, outputs: Any) -> None:
        if isinstance(context, ProfilingRecorder):
            super().end_forward(context, outputs)

    def recompute(self, run: Run) -> list[Tensor]:
        if not self._profile.sees_calls:
            return run()
        return run(partial(ProfilingReplayMode, self._profile, self._cached_ops, self._call_count))


class ProfilingRecorder(PlannedRecorder):
    """Times each call in forward, and notes which bytes its cached op would hold."""

    def __init__(self, recording: RecomputedCall, profile: LayerProfile) -> None:
        super().__init__(recording, LayerInstructions())
        self._profile = profile
        self._seen: set[tuple[int, int]] = set()

    def __enter__(self) -> Any:
        self._profile.begin_forward()
        return super().__enter__()

    def end_forward(self, outputs: Any) -> None:
        """End the forward: note which results can be cached, and cache none of them."""
        super().end_forward(outputs)
        is_cacheable = [self.cached_ops[op] is not None for op in range(len(self._profile.calls))]
        self._profile.end_forward(self._recording.saved_since(0), is_cacheable)
        self.cached_ops = {}

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        variant = attention_variant(args, kwargs) if is_attention else ""
        call = OpProfile(call_name(function, args, is_attention), variant, self._profile.mark())
        self._profile.calls.append(call)
        try:
            result = super()._run(function, args, kwargs, is_attention)
        finally:
            call.stop = self._profile.mark()
            call.slots = self._recording.slot_count
        call.summed_bytes = 0 if is_attention else _summed_bytes(tensors_in((args, kwargs)))
        return result

    def _is_wanted(self, op: int, function: Any, args: Any, is_attention: bool) -> bool:
        return True

    def _stash(self, op: int, tensor: Tensor) -> StashedTensor:
        storage, call, nbytes = tensor.untyped_storage(), self._profile.calls[op], size_bytes(tensor)
        address = (op, storage.data_ptr())
        if address not in self._seen:  # attention saves its own result as well
            self._seen.add(address)
            call.nbytes += nbytes
            call.small_bytes += nbytes if nbytes < max(self._profile.min_bytes, 1) else 0
            call.storages[storage.data_ptr()] = storage.nbytes()
            call.stored = self._profile.mark()
        return StashedTensor(tensor, None)


def _summed_bytes(arguments: list[Tensor]) -> int:
    """Return the bytes of a linear map's input that autograd frees only after it has summed the bias's gradient, without recomputation."""
    if not any(tensor.requires_grad and tensor.dim() == 1 for tensor in arguments):
        return 0
    return max((size_bytes(tensor) for tensor in arguments if tensor.dim() > 1 and not tensor.is_leaf), default=0)


class ProfilingReplayMode(ReplayMode):
    """Times each call of a layer as it runs again; further arguments are those of `ReplayMode`."""

    def __init__(self, profile: LayerProfile, *args: Any) -> None:
        super().__init__(*args)
        self._profile = profile
        self._calls_left = iter(profile.calls)

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        start = self._profile.mark()
        result = super()._run(function, args, kwargs, is_attention)
        call = next(self._calls_left, None)
        if call is not None and call.recomputed is None:
            call.recomputed = start, self._profile.mark()
        return result


class LayerKind(NamedTuple):
    """Layers that make the same calls, and the cost of one of them."""

    members: tuple[int, ...]  # indices of the layers
    names: tuple[str, ...]  # of the calls that all of them make, up to the first that differs
    cost: LayerCost  # mean of the layers; its operations are those whose results can be cached

    def instructions(self, layer: LayerPlan, fetch: int) -> LayerInstructions:
        point = self.cost.fetch_points[fetch]
        operations = self.cost.operations
        return LayerInstructions(
            keep=layer.keep,
            offload_boundary=layer.offload_boundary,
            on_device=frozenset(operations[i].op for i in layer.on_device),
            off_device=frozenset(operations[i].op for i in layer.off_device),
            call_names=self.names,
            prefetch_early=fetch == 0,
            prefetch_call=point.call if point.call >= 0 else None,
            prefetch_below=point.slots if point.call >= 0 else None,
            saved_bytes=self.cost.saved_bytes,
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


def planned(kind: LayerKind) -> LayerKind:
    """Return the kind with its slowest operations only, at most `_MAX_OPERATIONS`."""
    operations = kind.cost.operations
    slowest = sorted(operations, key=lambda one: -one.seconds)[:_MAX_OPERATIONS]
    return kind._replace(cost=replace(kind.cost, operations=tuple(one for one in operations if one in slowest)))


def _kind(members: Sequence[LayerProfile]) -> LayerKind:
    timed: Sequence[LayerProfile] = [layer for layer in members if not layer.is_host_bound]
    if all(layer.backward_s is None for layer in timed):
        timed = members
    names: list[str] = []
    operations: list[Operation] = []
    for op, calls in enumerate(zip(*(layer.calls for layer in members), strict=False)):
        if len({call.name for call in calls}) > 1:
            break
        names.append(calls[0].name)
        if all(call.is_cacheable for call in calls):
            operations.append(_operation(timed, op))
    forward_s = fmean(layer.forward_s for layer in timed)
    backwards = [layer.backward_s for layer in timed if layer.backward_s is not None]
    boundary = members[0].inputs.boundary_bytes
    saved = round(fmean(layer.saved_bytes for layer in members))
    # Without figures of an allocator, `working_bytes` and `late_bytes` are the saved tensors, or half of them, and two gradients.
    working = [layer.working_bytes for layer in members if layer.working_bytes]
    working_bytes = max(working, default=saved + 2 * boundary)
    points = _points(members, timed, len(names), working_bytes) if working else ()
    cost = LayerCost(
        forward_s=forward_s,
        backward_s=fmean(backwards) if backwards else 2 * forward_s,
        recompute_s=fmean(layer.recompute_s for layer in timed),
        boundary_bytes=boundary,
        saved_bytes=saved,
        working_bytes=working_bytes,
        late_bytes=working_bytes if working else saved // 2 + 2 * boundary,  # `points` replace it
        operations=tuple(operations),
        forward_bytes=max(layer.forward_bytes for layer in members),
        points=points,
        extra_bytes=max(layer.extra_bytes for layer in members),
        kept_bytes=_kept_bytes(members, points, working_bytes) if working else 0,
    )
    return LayerKind(tuple(layer.index for layer in members), tuple(names), cost)


def _operation(members: Sequence[LayerProfile], op: int) -> Operation:
    calls = [layer.calls[op] for layer in members]
    return Operation(
        name=calls[0].name,
        at=fmean(layer.share_of_forward(call.stop) for layer, call in zip(members, calls, strict=True)),
        seconds=fmean(call.recompute_s for call in calls),
        nbytes=round(fmean(call.nbytes for call in calls)),
        offload_at=fmean(
            layer.share_of_forward(call.stored or call.stop) for layer, call in zip(members, calls, strict=True)
        ),
        small_bytes=round(fmean(call.small_bytes for call in calls)),
        extra_bytes=round(fmean(call.extra_bytes for call in calls)),
        op=op,
    )


def _points(
    members: Sequence[LayerProfile], timed: Sequence[LayerProfile], calls: int, working_bytes: int
) -> tuple[Point, ...]:
    """Return the fetch points, the last call first: the backward of a call begins, and less memory is held than before."""
    seen = [layer for layer in members if layer.backward_s is not None]
    thresholds = [set(layer.passed) for layer in seen]
    points: list[Point] = []
    for op, call in reversed(list(enumerate(members[0].calls[:calls]))):
        threshold, held = call.slots, points[-1].nbytes if points else working_bytes
        is_everywhere = all(threshold in passed for passed in thresholds)
        if not is_everywhere or any(layer.calls[op].slots != threshold for layer in members):
            continue
        nbytes = max(layer.held_from(threshold) for layer in seen)
        if nbytes < _LESS * held:
            at = fmean(layer.reaches(threshold) for layer in timed if layer.backward_s is not None)
            ends_at = fmean(layer.share_of_forward(layer.calls[op].stop) for layer in timed)  # as an operation's
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
