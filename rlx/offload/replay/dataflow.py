"""The dataflow of a layer: which operation reads which result, and which results nobody reads if others are kept.

Note [how it is known that nobody reads]
While a layer is profiled, every torch function that it calls is noted, with the results among its arguments; results are
recognized by their storage. Linear maps and the functions in `_KNOWN` read their arguments and make one result. Any other
function may do anything, so it needs its arguments, unless it returns a view: a view is the same result. Autograd needs the
tensors that it saves. If an argument has a graph but no noted function made it, something computes unseen; then the layer has
no dead ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlx.offload.storage.regions import is_parameter, is_plain, storage_address

_NAMES = (
    *("add", "sub", "mul", "div", "neg", "pow", "square", "rsqrt", "sqrt", "exp", "mean", "sum", "cat"),
    *("silu", "gelu", "relu", "sigmoid", "tanh", "softplus"),
    *("to", "float", "half", "bfloat16", "double", "type_as"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__pow__"),
)
# Functions of their arguments alone: no random numbers, nothing written, one tensor as the result.
_KNOWN: dict[Any, str] = {
    function: name
    for name in _NAMES
    for function in (getattr(home, name, None) for home in (torch, torch.Tensor, F))
    if function is not None
}
GETTER = type(object().__str__)  # the type of getters such as Tensor.shape, and of no other function
CALL = "call"  # the name of attention and linear maps among the reads


def known_name(function: Any, kwargs: Any) -> str | None:
    """Return the name of a function, other than a linear map, that may be cached or dead; None for any other."""
    name = _KNOWN.get(function)
    return name if name is None or not kwargs or "out" not in kwargs else None


class OpNode(NamedTuple):
    """One operation of a layer."""

    op: int  # its index (Note [op indices] in `rlx.offload.replay.instructions`)
    reads: tuple[int, ...]  # positions of the nodes whose results it was given
    may_be_dead: bool  # its slots can be filled from its arguments, and its result is one floating-point tensor


class Dataflow(NamedTuple):
    """The operations of a layer, in the order in which they run."""

    nodes: tuple[OpNode, ...]
    needed: tuple[int, ...]  # positions of the nodes whose results autograd saves, or an unknown function reads
    other_names: tuple[str, ...]  # of the operations with a negative index
    reads: tuple[tuple[str, int], ...]  # (function, op) for each read of a result of an operation

    def dead_ops(self, cached: Collection[int]) -> frozenset[int]:
        """Return the operations whose results nobody reads if the results of `cached` are kept.

        Operations behind the last one that is read are not among them: recomputation stops before them.
        """
        needed: set[int] = set()
        pending = [*self.needed]
        for node in self.nodes:
            if not node.may_be_dead and node.op not in cached:
                pending += node.reads
        while pending:
            position = pending.pop()
            if position not in needed:
                needed.add(position)
                if self.nodes[position].op not in cached:
                    pending += self.nodes[position].reads
        return frozenset(
            node.op
            for position, node in enumerate(self.nodes[: max(needed, default=0)])
            if node.may_be_dead and position not in needed and node.op not in cached
        )

    def reads_of(self, ops: Collection[int]) -> tuple[tuple[str, int], ...]:
        """Return the reads of the results of some operations."""
        return tuple(read for read in self.reads if read[1] in ops)


class Producers:
    """Finds the operation that made a tensor, by the tensor's storage, for as long as that lives."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, int]] = {}

    def note(self, tensor: Tensor, number: int) -> None:
        """Note that an operation has made a tensor."""
        storage = tensor.untyped_storage()
        self._made[id(storage)] = weakref.ref(storage), number

    def of(self, tensor: Tensor) -> int | None:
        """Return the operation whose result a tensor is, or is a view of; None if there is none."""
        storage = tensor.untyped_storage()
        reference, number = self._made.get(id(storage), (None, 0))
        return number if reference is not None and reference() is storage else None


class DataflowRecorder:
    """Notes the dataflow of a layer while it is profiled; `inputs` are the addresses of its inputs' storages."""

    def __init__(self, inputs: Container[int]) -> None:
        self._nodes: list[OpNode] = []
        self._needed: set[int] = set()
        self._other_names: list[str] = []
        self._reads: list[tuple[str, int]] = []
        self._producers = Producers()
        self._inputs = inputs
        self._is_lost = False

    def note(
        self, op: int, name: str, arguments: Sequence[Tensor], results: Sequence[Tensor], may_be_dead: bool
    ) -> None:
        """An operation that is known has run."""
        if op < 0:
            self._other_names.append(name)
        reads, position = self._readers(name, arguments), len(self._nodes)
        here = {storage_address(tensor) for tensor in arguments if is_plain(tensor)}
        is_new = all(is_plain(tensor) and storage_address(tensor) not in here for tensor in results)
        if not is_new:
            self._needed.update(reads)  # it returns an argument or a view of one
        else:
            for tensor in results:
                self._producers.note(tensor, position)
        is_one = len(results) == 1 and results[0].is_floating_point()
        self._nodes.append(OpNode(op, tuple(reads), may_be_dead and is_new and is_one))

    def note_unknown(
        self, function: Any, arguments: Sequence[Tensor], has_written: bool, results: Sequence[Tensor]
    ) -> None:
        """A function that is not known has run."""
        reads = self._readers(getattr(function, "__name__", ""), arguments)
        here = {storage_address(tensor) for tensor in arguments if is_plain(tensor)}
        are_views = bool(results) and all(is_plain(tensor) and storage_address(tensor) in here for tensor in results)
        if has_written or not are_views:
            self._needed.update(reads)

    def dataflow(self, saved: Sequence[Tensor]) -> Dataflow | None:
        """Return the dataflow at the end of the layer; None if something computes unseen."""
        if self._is_lost:
            return None
        for tensor in saved:
            number = self._producers.of(tensor) if is_plain(tensor) else None
            if number is not None:
                self._needed.add(number)
        return Dataflow(tuple(self._nodes), tuple(sorted(self._needed)), tuple(self._other_names), tuple(self._reads))

    def _readers(self, name: str, arguments: Sequence[Tensor]) -> list[int]:
        found = []
        for tensor in arguments:
            if not is_plain(tensor) or is_parameter(tensor):
                continue
            number = self._producers.of(tensor)
            if number is not None:
                found.append(number)
                self._reads.append((name, self._nodes[number].op))
            elif tensor.grad_fn is not None and storage_address(tensor) not in self._inputs:
                self._is_lost = True
        return found
