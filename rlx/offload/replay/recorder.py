"""Which calls of a layer's forward leave an `CachedOp`: those of `save="attention"`, or those that a plan names.

Note [when a result is stored]
A kernel that is an autograd Function may write to a result in place past the version counter (Liger's rotary embedding
does). Bytes that are stored before such a write could be torn by it, bytes stored after it would be written to twice. So
the result of a linear map is stored when it is known what works on it: at the call of attention, if what attention gets
does not lie where the result lay, or reaches it by views alone; else when a later call, or the layer's end, is reached from
it in the graph and no autograd Function lies next to it. What is not reached within some nodes runs again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from rlx.offload.recompute.stash import StashedTensor
from rlx.offload.replay.cached_op import CachedOp, DeadOp, LayerRecording, sources_of, why_not_cacheable
from rlx.offload.replay.dataflow import CALL, Trail, known_name
from rlx.offload.replay.layer_policy import LayerPolicy
from rlx.offload.replay.replay_mode import OpMode, register_known_attention
from rlx.offload.runtime.pytree import map_leaves, tensors_in
from rlx.offload.storage.regions import is_plain, storage_address

# The last linear map is answered if repeating it takes at least this many operations for each byte of its result: on
# current machines a link moves one byte in the time of some thousand operations, and has room left at this point.
MIN_OPERATIONS_PER_BYTE = 1000
_PLAIN = frozenset({type(None), bool, int, float, str, tuple})  # types whose values tell kinds of attention apart
_MAX_NODES, _MAX_LEVELS = 96, 12  # of the graph that are looked at behind a call, levels since the last find


class Recorder(OpMode):
    """Keeps answers while a layer's forward runs; subclasses say of which calls.

    Args:
        recording: the layer call.
    """

    def __init__(self, recording: LayerRecording) -> None:
        super().__init__()
        self.answers: dict[int, CachedOp | None] = {}  # by places
        self.call_count = 0
        self.attention_count = 0
        self.attention_slots: int | None = None  # how many slots there are up to the map behind the last attention
        self.refused: str | None = None
        self._recording = recording
        # Place among the answers -> a result that may be stored, and the node of the graph that made it.
        self._pending: dict[int, tuple[Any, Node | None]] = {}
        self._wants_next = False

    def end_forward(self, outputs: Any) -> None:
        """Close the forward: settle what is pending, and drop answers whose results were written to."""
        self._settle(outputs)
        self._drop_pending()
        self.answers = {p: a if a is not None and a.is_result_untouched else None for p, a in self.answers.items()}

    def _settle(self, outputs: Any) -> None:
        """Store those of the pending results that are wanted, at the end of the layer."""
        raise NotImplementedError

    def _next_place(self) -> int:
        """The place of a call that begins."""
        place = self.call_count
        self.call_count += 1
        self.answers[place] = None  # also where the call fails and the layer goes on
        return place

    def _save(self, place: int, tensor: Tensor) -> StashedTensor | None:
        """Where what is left of a call goes."""
        return self._recording.store(tensor)

    def _watched(
        self, function: Any, args: Any, kwargs: Any, arguments: list[Tensor], is_attention: bool, place: int
    ) -> tuple[Any, CachedOp | None]:
        """Run a call; returns its result and what is needed to answer it, None if it has to run again."""
        versions = versions_of(arguments)
        first_slot = self._recording.slot_count
        result = function(*args, **kwargs)
        seen = self._recording.saved_since(first_slot)
        results = tensors_in(result)
        refused = why_not_cacheable((*arguments, *results))
        if not results or not all(map(is_plain, seen)):
            refused = "gives or saves something else than tensors"
        if versions != versions_of(arguments):
            refused = "writes to its arguments"
        if refused is None:
            saved = sources_of(seen, arguments, results, lambda tensor: self._save(place, tensor), is_attention)
            if saved is not None:
                return result, CachedOp(function, first_slot, arguments, saved, result)
            refused = "saves more than a fused kernel of attention does: its scores, or copies"
        if is_attention:
            self.refused = refused
        return result, None

    def _note_answer(self, place: int, answer: CachedOp | None, result: Any, is_attention: bool) -> None:
        """Store the result of attention and of the map behind it, or let it wait (Note [when a result is stored])."""
        self.answers[place] = answer
        if is_attention:
            self.attention_count += 1
            if answer is not None:
                answer.random_state = self._recording.random_state()
                self._store(place, result)
        elif self._wants_next:
            self._store(place, result)
        elif answer is not None:
            node = result.grad_fn if isinstance(result, Tensor) else None
            self._pending[place] = map_leaves(_detached, result), node

    def _note_call(self, is_attention: bool) -> None:
        if self._wants_next and not is_attention:
            self.attention_slots = self._recording.slot_count
        self._wants_next = is_attention

    def _store_pending(self, arguments: list[Tensor]) -> None:
        """Store the results before attention, but for those that a kernel may have written to unseen."""
        addresses = list(map(storage_address, arguments))
        for place, (result, node) in self._pending.items():
            here = [storage_address(tensor) for tensor in tensors_in(result)]
            looks = [argument for argument, address in zip(arguments, addresses, strict=True) if address in here]
            if all(_is_reached_by_views(argument.grad_fn, node) for argument in looks):
                self._store(place, result)
            else:
                self.answers[place] = None
        self._pending.clear()

    def _store(self, place: int, result: Any) -> None:
        answer = self.answers[place]
        if answer is not None and not answer.store_result(lambda tensor: self._save(place, tensor), result):
            self.answers[place] = None

    def _drop_pending(self) -> None:
        for place in self._pending:
            self.answers[place] = None
        self._pending.clear()


class AttentionRecorder(Recorder):
    """`save="attention"`: attention, the linear maps before it, the first one behind it and the layer's last one.

    Results of the linear maps behind attention are looked at when it is known what comes after them, so only one of them
    is held.

    Args:
        recording: the layer call.
        expected: how many attention calls the layer made when it ran before; 0 where it has not.
    """

    def __init__(self, recording: LayerRecording, expected: int) -> None:
        super().__init__(recording)
        if not expected:
            register_known_attention()  # libraries that load late
        self._expected = expected

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        arguments = tensors_in((args, kwargs))
        if is_attention:
            self._store_pending(arguments)
        place = self._next_place()
        behind_attention = self.attention_count >= max(self._expected, 1) and not is_attention and not self._wants_next
        if behind_attention:
            self._drop_pending()
            if not _is_worth(function, args):
                return function(*args, **kwargs)
        result, answer = self._watched(function, args, kwargs, arguments, is_attention, place)
        self._note_answer(place, answer, result, is_attention)
        self._note_call(is_attention)
        return result

    def _settle(self, outputs: Any) -> None:
        if self._pending and self.attention_count:
            place, (result, _) = next(reversed(self._pending.items()))
            answer = self.answers[place]
            if answer is not None and answer.next_slot < self._recording.slot_count:
                self._store(place, result)
                self._pending.pop(place)


class PlannedRecorder(Recorder):
    """The operations that a plan names, and those whose results nobody reads then.

    Args:
        recording: the layer call.
        orders: the plan for the layer.
    """

    def __init__(self, recording: LayerRecording, orders: LayerPolicy) -> None:
        super().__init__(recording)
        self._orders = orders
        self.is_off_plan = False  # the layer calls something else than when it was measured
        self.sees_all = bool(orders.others)
        self._other_count = 0
        self._is_off_flow = False  # it does anything else than when it was measured
        self._unread = Trail()
        self._readings: list[tuple[str, int]] = []

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        arguments = tensors_in((args, kwargs))
        if is_attention:
            self._store_pending(arguments)
        elif self._pending and self.attention_count:
            self._store_reached(arguments)
        place = self._next_place()
        self._look_at_readers(CALL, arguments)
        if place in self._orders.unread:
            result = self._run_unread(place, function, args, kwargs, arguments)
            self._is_wanted(place, function, args, is_attention)
        elif not self._is_wanted(place, function, args, is_attention):
            result = function(*args, **kwargs)
            self.attention_count += is_attention
        else:
            result, answer = self._watched(function, args, kwargs, arguments, is_attention, place)
            self._note_answer(place, answer, result, is_attention)
        self._note_call(is_attention)
        return result

    def end_forward(self, outputs: Any) -> None:
        """Close the forward: without its results that something reads by another way than it was measured."""
        super().end_forward(outputs)
        orders = self._orders
        is_same = not self._is_off_flow and not self.is_off_plan and self._other_count == len(orders.others)
        if not is_same or tuple(self._readings) != orders.readings:
            self.answers = {p: a for p, a in self.answers.items() if not isinstance(a, DeadOp)}

    def run_other(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See `OpMode.run_other`."""
        orders, arguments = self._orders, tensors_in((args, kwargs))
        name = known_name(function, kwargs)
        if name is None:
            self._look_at_readers(getattr(function, "__name__", ""), arguments)
            return function(*args, **kwargs)
        self._look_at_readers(name, arguments)
        self._other_count += 1
        place, index = -self._other_count, self._other_count - 1
        self._is_off_flow = self._is_off_flow or index >= len(orders.others) or orders.others[index] != name
        if self._is_off_flow:
            return function(*args, **kwargs)
        if place in orders.unread:
            return self._run_unread(place, function, args, kwargs, arguments)
        if place not in orders.on_device and place not in orders.off_device:
            return function(*args, **kwargs)
        result, answer = self._watched(function, args, kwargs, arguments, False, place)
        self.answers[place] = answer
        if answer is not None:
            self._pending[place] = map_leaves(_detached, result), result.grad_fn
        return result

    def _run_unread(self, place: int, function: Any, args: Any, kwargs: Any, arguments: list[Tensor]) -> Any:
        """Run an operation whose result nobody is going to read when the layer is recomputed."""
        first_slot = self._recording.slot_count
        result = function(*args, **kwargs)
        seen = self._recording.saved_since(first_slot)
        saved = sources_of(seen, arguments, [], lambda tensor: None, is_attention=False)
        if saved is not None and isinstance(result, Tensor) and why_not_cacheable((*arguments, result)) is None:
            self.answers[place] = DeadOp(function, first_slot, arguments, saved, result)
            self._unread.note(result, place)
        else:
            self._is_off_flow = True
        return result

    def _look_at_readers(self, name: str, arguments: list[Tensor]) -> None:
        if self._orders.unread:
            for tensor in arguments:
                place = self._unread.of(tensor) if type(tensor) is Tensor else None
                if place is not None:
                    self._readings.append((name, place))

    def _is_wanted(self, place: int, function: Any, args: Any, is_attention: bool) -> bool:
        names = self._orders.names
        if names is not None and not self.is_off_plan and place < len(names):
            self.is_off_plan = names[place] != call_name(function, args, is_attention)
        return not self.is_off_plan and (place in self._orders.on_device or place in self._orders.off_device)

    def _save(self, place: int, tensor: Tensor) -> StashedTensor | None:
        return self._recording.keep(tensor) if place in self._orders.on_device else self._recording.store(tensor)

    def _settle(self, outputs: Any) -> None:
        for place in tuple(self._pending):
            answer = self.answers[place]
            if answer is None or answer.next_slot >= self._recording.slot_count:  # recomputation ends before its result
                self._pending.pop(place)
                self.answers[place] = None
        if self._pending:
            self._store_reached(tensors_in(outputs))

    def _store_reached(self, tensors: Iterable[Tensor]) -> None:
        """Store the pending results from which the tensors were made, unless an autograd Function works on them."""
        nodes = {node: place for place, (_, node) in self._pending.items() if node is not None}
        found, order = _reached(tensors, nodes), list(self._pending)
        # They leave, and come back, in the order in which recomputation asks for them.
        for node, is_next_to_function in sorted(found.items(), key=lambda one: order.index(nodes[one[0]])):
            place = nodes[node]
            result, _ = self._pending.pop(place)
            if is_next_to_function:
                self.answers[place] = None
            else:
                self._store(place, result)


def call_name(function: Any, args: Sequence[Any], is_attention: bool) -> str:
    """What a call is called: `attention`, or `linear 3584x18944` with the widths of what goes in and comes out."""
    if is_attention:
        return "attention"
    place = 2 if function is torch.addmm else 1
    weight = args[place] if len(args) > place else None
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        return "linear"
    rows, columns = weight.shape[-2:]
    wide = (columns, rows) if function is torch.nn.functional.linear else (rows, columns)
    return f"linear {wide[0]}x{wide[1]}"


def attention_variant(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What tells dear attention from cheap in one pass: all that is no tensor (windows, causality), and where masks are."""
    named = [*enumerate(args), *sorted(kwargs.items())]
    return ", ".join(f"{name}={value if type(value) in _PLAIN else type(value).__name__}" for name, value in named)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Their version counters; 0 where there is none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _is_reached_by_views(start: Node | None, node: Node | None) -> bool:
    """Whether the way back from one node to another passes no autograd Function."""
    for _ in range(32):
        if start is None or isinstance(start, BackwardCFunction):
            return False
        if start is node:
            return True
        start = start.next_functions[0][0] if start.next_functions else None
    return False


def _reached(tensors: Iterable[Tensor], wanted: Container[Node]) -> dict[Node, bool]:
    """Of some nodes those that lie behind tensors, and whether an autograd Function works on them.

    It may where it lies on a way to them: what is in between may be views, and nothing tells these from other nodes.
    """
    found: dict[Node, bool] = {}
    seen: set[tuple[Node, bool]] = set()
    ways = [(tensor.grad_fn, False) for tensor in tensors if tensor.grad_fn is not None]
    levels_left = _MAX_LEVELS
    while ways and levels_left and len(seen) < _MAX_NODES:
        levels_left -= 1
        behind: list[tuple[Node, bool]] = []
        for way in ways:
            if way in seen:
                continue
            seen.add(way)
            node, is_behind_function = way
            if node in wanted:
                found[node] = found.get(node, False) or is_behind_function
                levels_left = _MAX_LEVELS
            is_function = isinstance(node, BackwardCFunction) or (is_behind_function and node not in wanted)
            behind += [(before, is_function) for before, _ in node.next_functions if before is not None]
        ways = behind
    return found


def _is_worth(function: Any, args: Sequence[Any]) -> bool:
    """Whether repeating a linear map is dearer than bringing its result back: by operations for each byte of it."""
    place = 1 if function is torch.addmm else 0  # behind the bias
    if len(args) <= place or not isinstance(args[place], Tensor) or not args[place].dim():
        return False
    tensor: Tensor = args[place]
    return 2 * tensor.shape[-1] >= MIN_OPERATIONS_PER_BYTE * tensor.element_size()
