"""Recorders: they make a `CachedOp` of calls in a layer's forward, those of `save="attention"` or those that a plan names.

Note [when a result is stashed]
A kernel may write to a result past the version counter, as Liger's rotary embedding does, an autograd Function. Stashed before such a
write, a result may be torn; stashed after it, the recomputation would repeat the write. So the result of a linear map waits until it is
known which operation reads it:

* At a call of attention it is stashed if the arguments do not share its memory, or are views of it.
* Otherwise it is stashed when a later call, or the layer's end, is reached from it in the graph within `MAX_NODES` nodes, and no
  autograd Function reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from rlx.offload.recompute.checkpoint import RecomputedCall
from rlx.offload.recompute.saved_inputs import StashedTensor
from rlx.offload.replay.cached_op import CachedOp, sources_of, why_not_cacheable
from rlx.offload.replay.replay_mode import OpMode, register_known_attention
from rlx.offload.runtime.pytree import map_leaves, tensors_in
from rlx.offload.storage.tensor_bytes import is_plain, storage_address, version_of

# The last linear map is cached if repeating it takes at least this many operations per byte of its result: machines compute some
# thousand operations while the link moves one byte.
MIN_OPERATIONS_PER_BYTE = 1000
_PLAIN = frozenset({type(None), bool, int, float, str, tuple})  # types whose values distinguish variants of attention


class Producers:
    """Finds the operation that made a tensor, by the tensor's storage, for as long as that lives."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, int]] = {}

    def note(self, tensor: Tensor, number: int) -> None:
        storage = tensor.untyped_storage()
        self._made[id(storage)] = weakref.ref(storage), number

    def of(self, tensor: Tensor) -> int | None:
        storage = tensor.untyped_storage()
        reference, number = self._made.get(id(storage), (None, 0))
        return number if reference is not None and reference() is storage else None


@dataclass(frozen=True)
class LayerInstructions:
    """A plan's decisions for one layer. A layer's calls of attention and of linear maps are numbered 0, 1, 2, … in order."""

    keep: bool = False  # run the layer without recomputation; the other fields have no effect then
    offload_boundary: bool = True  # offload the layer's inputs; else keep them on the device
    on_device: frozenset[int] = frozenset()  # cached ops whose results are kept on the device
    off_device: frozenset[int] = frozenset()  # cached ops whose results are offloaded
    # Of all calls, by `call_name`; None: any. From the first call with another name on, no call is cached.
    call_names: tuple[str, ...] | None = None
    # When to prefetch the layer before: as this layer's recomputation begins; else when backward reaches a call, or asks for
    # a slot below a number. None: when backward has passed the operations after attention.
    prefetch_early: bool = False
    prefetch_call: int | None = None
    prefetch_below: int | None = None
    saved_bytes: int = 0  # by autograd in the layer, if known

    @property
    def cached_ops(self) -> frozenset[int]:
        return self.on_device | self.off_device


class Recorder(OpMode):
    """Makes cached ops while a layer's forward runs; subclasses choose the calls."""

    def __init__(self, recording: RecomputedCall) -> None:
        super().__init__()
        self.cached_ops: dict[int, CachedOp | None] = {}  # by op index
        self.call_count = 0
        self.attention_count = 0
        self.attention_slots: int | None = None  # slots up to the end of the map after the last attention
        self.refusal: str | None = None  # why attention was not cached
        self._recording = recording
        self._producers = Producers()  # of the results of cached ops
        # By op index: a result that waits to be stashed, and the node of the graph that made it.
        self._pending: dict[int, tuple[Any, Node | None]] = {}
        self._wants_next = False

    def end_forward(self, outputs: Any) -> None:
        """Decide on pending results, and drop cached ops whose results were written to."""
        self._settle(outputs)
        self._drop_pending()
        self.cached_ops = {
            op: cached_op if cached_op is not None and cached_op.is_result_untouched else None
            for op, cached_op in self.cached_ops.items()
        }

    def _settle(self, outputs: Any) -> None:
        """Stash the pending results that are wanted, at the end of the layer."""
        raise NotImplementedError

    def _next_op(self) -> int:
        op = self.call_count
        self.call_count += 1
        self.cached_ops[op] = None  # stays None if the call fails and the layer continues
        return op

    def _stash(self, op: int, tensor: Tensor) -> StashedTensor | None:
        return self._recording.stash(tensor)

    def _record(
        self, function: Any, args: Any, kwargs: Any, arguments: list[Tensor], is_attention: bool, op: int
    ) -> tuple[Any, CachedOp | None]:
        """Run a call; return its result and its cached op, or None if it has to run again."""
        versions = list(map(version_of, arguments))
        first_slot = self._recording.slot_count
        result = function(*args, **kwargs)
        seen = self._recording.saved_since(first_slot)
        results = tensors_in(result)
        refusal = why_not_cacheable((*arguments, *results))
        if not results or not all(map(is_plain, seen)):
            refusal = "returns or saves something other than tensors"
        if versions != list(map(version_of, arguments)):
            refusal = "writes to its arguments"
        if refusal is None:
            saved = sources_of(seen, arguments, results, lambda tensor: self._stash(op, tensor), is_attention)
            if saved is not None:
                for tensor in results:
                    self._producers.note(tensor, op)
                return result, CachedOp(function, first_slot, arguments, saved, result)
            refusal = "saves more than a fused kernel of attention does: its scores, or copies"
        if is_attention:
            self.refusal = refusal
        return result, None

    def note_unsafe_split(self, arguments: list[Tensor]) -> None:
        """See `OpMode.note_unsafe_split`; the split result is not cached."""
        for tensor in filter(is_plain, arguments):
            if (op := self._producers.of(tensor)) is not None:
                self.cached_ops[op] = None

    def _note_cached_op(self, op: int, cached_op: CachedOp | None, result: Any, is_attention: bool) -> None:
        """Stash the result of attention and of the map after it; let others wait (Note [when a result is stashed])."""
        self.cached_ops[op] = cached_op
        if is_attention:
            self.attention_count += 1
            if cached_op is not None:
                cached_op.random_state = self._recording.random_state()
                self._stash_result(op, result)
        elif self._wants_next:
            self._stash_result(op, result)
        elif cached_op is not None:
            node = result.grad_fn if isinstance(result, Tensor) else None
            self._pending[op] = map_leaves(_detached, result), node

    def _note_call(self, is_attention: bool) -> None:
        if self._wants_next and not is_attention:
            self.attention_slots = self._recording.slot_count
        self._wants_next = is_attention

    def _stash_pending(self, arguments: list[Tensor]) -> None:
        """Stash the results before attention, except those that a kernel may have written to unnoticed."""
        addresses = list(map(storage_address, arguments))
        for op, (result, node) in self._pending.items():
            here = [storage_address(tensor) for tensor in tensors_in(result)]
            shared = [argument for argument, address in zip(arguments, addresses, strict=True) if address in here]
            if all(is_reached_by_views(argument.grad_fn, node) for argument in shared):
                self._stash_result(op, result)
            else:
                self.cached_ops[op] = None
        self._pending.clear()

    def _stash_result(self, op: int, result: Any) -> None:
        cached_op = self.cached_ops[op]
        if cached_op is not None and not cached_op.stash_result(lambda tensor: self._stash(op, tensor), result):
            self.cached_ops[op] = None

    def _is_reached(self, op: int) -> bool:
        cached_op = self.cached_ops[op]
        return cached_op is not None and cached_op.next_slot < self._recording.slot_count

    def _drop_pending(self) -> None:
        for op in self._pending:
            self.cached_ops[op] = None
        self._pending.clear()


class AttentionRecorder(Recorder):
    """`save="attention"`: attention, the linear maps before it, the first one after it, the layer's last one if recomputation passes it.

    Only the layer's end shows which linear map is the last one, so the result of each is held until the next map runs. `expected`
    is the number of attention calls in the layer's previous forward; 0 for the first.
    """

    def __init__(self, recording: RecomputedCall, expected: int) -> None:
        super().__init__(recording)
        if not expected:
            register_known_attention()  # libraries that load late
        self._expected = expected

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        arguments = tensors_in((args, kwargs))
        if is_attention:
            self._stash_pending(arguments)
        op = self._next_op()
        if self.attention_count >= max(self._expected, 1) and not is_attention and not self._wants_next:
            self._drop_pending()
            if not _is_worth_caching(function, args):
                return function(*args, **kwargs)
        result, cached_op = self._record(function, args, kwargs, arguments, is_attention, op)
        self._note_cached_op(op, cached_op, result, is_attention)
        self._note_call(is_attention)
        return result

    def _settle(self, outputs: Any) -> None:
        if self._pending and self.attention_count:
            op, (result, _) = next(reversed(self._pending.items()))
            if self._is_reached(op):
                self._stash_result(op, result)
                self._pending.pop(op)


class PlannedRecorder(Recorder):
    """The operations that a plan names."""

    def __init__(self, recording: RecomputedCall, instructions: LayerInstructions) -> None:
        super().__init__(recording)
        self._instructions = instructions
        self._cached = instructions.cached_ops
        self.is_off_plan = False  # the layer makes other calls than when it was profiled

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        arguments = tensors_in((args, kwargs))
        if is_attention:
            self._stash_pending(arguments)
        elif self._pending and self.attention_count:
            self._stash_reached(arguments)
        op = self._next_op()
        if self._is_wanted(op, function, args, is_attention):  # also notes whether the layer is off the plan
            result, cached_op = self._record(function, args, kwargs, arguments, is_attention, op)
            self._note_cached_op(op, cached_op, result, is_attention)
        else:
            result = function(*args, **kwargs)
            self.attention_count += is_attention
        self._note_call(is_attention)
        return result

    def _is_wanted(self, op: int, function: Any, args: Any, is_attention: bool) -> bool:
        names = self._instructions.call_names
        if names is not None and not self.is_off_plan and op < len(names):
            self.is_off_plan = names[op] != call_name(function, args, is_attention)
        return not self.is_off_plan and op in self._cached

    def _stash(self, op: int, tensor: Tensor) -> StashedTensor | None:
        is_on_device = op in self._instructions.on_device
        return self._recording.keep(tensor) if is_on_device else self._recording.stash(tensor)

    def _settle(self, outputs: Any) -> None:
        for op in tuple(self._pending):
            if not self._is_reached(op):
                self._pending.pop(op)
                self.cached_ops[op] = None
        if self._pending:
            self._stash_reached(tensors_in(outputs))

    def _stash_reached(self, tensors: Iterable[Tensor]) -> None:
        """Stash the pending results from which the tensors were made, unless an autograd Function reads them."""
        nodes = {node: op for op, (_, node) in self._pending.items() if node is not None}
        found, order = reached(tensors, nodes), list(self._pending)
        # In the order in which recomputation asks for them.
        for node, is_next_to_function in sorted(found.items(), key=lambda one: order.index(nodes[one[0]])):
            op = nodes[node]
            result, _ = self._pending.pop(op)
            if is_next_to_function:
                self.cached_ops[op] = None
            else:
                self._stash_result(op, result)


def call_name(function: Any, args: Sequence[Any], is_attention: bool) -> str:
    """Return a call's name: `attention`, or `linear 3584x18944` with the widths of input and output."""
    if is_attention:
        return "attention"
    index = 2 if function is torch.addmm else 1
    weight = args[index] if len(args) > index else None
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        return "linear"
    rows, columns = weight.shape[-2:]
    wide = (columns, rows) if function is torch.nn.functional.linear else (rows, columns)
    return f"linear {wide[0]}x{wide[1]}"


def attention_variant(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return all arguments that are no tensors (windows, causality) and where masks are: they decide the time of attention."""
    named = [*enumerate(args), *sorted(kwargs.items())]
    return ", ".join(f"{name}={value if type(value) in _PLAIN else type(value).__name__}" for name, value in named)


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _is_worth_caching(function: Any, args: Sequence[Any]) -> bool:
    index = 1 if function is torch.addmm else 0  # after the bias
    tensor = args[index] if len(args) > index else None
    if not isinstance(tensor, Tensor) or not tensor.dim():
        return False
    return 2 * tensor.shape[-1] >= MIN_OPERATIONS_PER_BYTE * tensor.element_size()


MAX_NODES, MAX_LEVELS = 96, 12  # of the graph, searched behind a call; levels since the last find


def is_reached_by_views(start: Node | None, node: Node | None) -> bool:
    """Whether the path from one node back to another passes no autograd Function."""
    for _ in range(32):
        if start is None or isinstance(start, BackwardCFunction):
            return False
        if start is node:
            return True
        start = start.next_functions[0][0] if start.next_functions else None
    return False


def reached(tensors: Iterable[Tensor], wanted: Container[Node]) -> dict[Node, bool]:
    """Return the wanted nodes from which tensors were made, and whether there is an autograd Function on the path, maybe behind views."""
    found: dict[Node, bool] = {}
    seen: set[tuple[Node, bool]] = set()
    pending = [(tensor.grad_fn, False) for tensor in tensors if tensor.grad_fn is not None]
    levels_left = MAX_LEVELS
    while pending and levels_left and len(seen) < MAX_NODES:
        levels_left -= 1
        behind: list[tuple[Node, bool]] = []
        for way in pending:
            if way in seen:
                continue
            seen.add(way)
            node, is_behind_function = way
            if node in wanted:
                found[node] = found.get(node, False) or is_behind_function
                levels_left = MAX_LEVELS
            is_function = isinstance(node, BackwardCFunction) or (is_behind_function and node not in wanted)
            behind += [(before, is_function) for before, _ in node.next_functions if before is not None]
        pending = behind
    return found
