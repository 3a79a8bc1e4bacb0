"""A cached op: an operation whose result is kept, so that recomputation does not run it again.

Example: of `y = F.linear(x, w)` autograd saves `x` and `w`, which recomputation has anyway. The cached op keeps `y`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.recompute.ambient_state import RandomState, autocast_dtype
from rlx.offload.recompute.saved_inputs import StashedTensor
from rlx.offload.runtime.pytree import map_leaves, tensors_in
from rlx.offload.storage.tensor_bytes import VersionProbe, is_plain, size_bytes, span_bytes, storage_address

# A fused kernel of attention saves at most this many times the bytes of its result, besides its arguments. Attention that
# saves more saves its scores, and is not cached.
_MAX_SAVED_RATIO = 2.0

Stash = Callable[[Tensor], StashedTensor | None]  # stashes a tensor; None if there is no room for it


class _FromArgument(NamedTuple):
    """A saved tensor that is an argument of the call, or a view of an argument's memory."""

    argument: int  # the number of the argument
    # None for the argument itself. Else the saved tensor's shape, stride and offset from the argument's first element
    # [elements], then the argument's shape and stride.
    view: tuple[torch.Size, tuple[int, ...], int, torch.Size, tuple[int, ...]] | None
    dtype: torch.dtype  # autocast casts the argument to this dtype first

    def of(self, arguments: Sequence[Tensor]) -> Tensor | None:
        """Return the tensor, made from the arguments of the repeated call; None if their strides have changed."""
        argument = arguments[self.argument].detach()
        if self.view is None:
            return argument
        shape, stride, offset, argument_shape, argument_stride = self.view
        if argument.shape != argument_shape or argument.stride() != argument_stride:
            return None
        argument = argument.to(self.dtype)
        return argument.as_strided(shape, stride, int(argument.storage_offset()) + offset)


Source = _FromArgument | StashedTensor  # of a saved tensor


class CachedOp:
    """An operation of forward that recomputation need not run: it fills the operation's slots and hands out its result."""

    __slots__ = ("_parameters", "_probes", "_result", "_saved", "_stashed", "first_slot", "function", "random_state")

    def __init__(
        self, function: Any, first_slot: int, arguments: Sequence[Tensor], saved: list[Source], result: Any
    ) -> None:
        self.function = function
        self.first_slot = first_slot
        self.random_state: RandomState | None = None
        self._parameters = [(i, argument) for i, argument in enumerate(arguments) if type(argument) is Parameter]
        self._saved = saved
        self._probes = [VersionProbe(tensor) for tensor in tensors_in(result)]
        self._result: Any = None
        self._stashed: list[StashedTensor | None] = []  # the tensors of `_result`

    @property
    def next_slot(self) -> int:
        return self.first_slot + len(self._saved)

    def stash_result(self, stash: Stash, result: Any) -> bool:
        """Stash the result; False if the layer has written to it, or if there is no room."""

        def stash_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            stashed = stash(leaf)
            self._stashed.append(stashed)
            return stashed

        if not self.is_result_untouched:
            return False
        self._result = map_leaves(stash_leaf, result)
        return None not in self._stashed

    @property
    def is_result_untouched(self) -> bool:
        return all(probe.is_untouched for probe in self._probes)

    @property
    def is_whole(self) -> bool:
        return all(one.is_whole for one in (*self._saved, *self._stashed) if isinstance(one, StashedTensor))

    def saved(self, arguments: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the tensors that autograd would save, in order; None if the arguments differ from those of forward."""
        if any(i >= len(arguments) or arguments[i] is not was for i, was in self._parameters):
            return None
        tensors = []
        for source in self._saved:
            tensor = source.tensor().detach() if isinstance(source, StashedTensor) else source.of(arguments)
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors

    def result(self) -> Any:
        return map_leaves(lambda leaf: leaf.tensor() if isinstance(leaf, StashedTensor) else leaf, self._result)


def why_not_cacheable(tensors: Sequence[Tensor]) -> str | None:
    if not all(map(is_plain, tensors)):
        return "works on subclasses of tensors"
    if not all(map(storage_address, tensors)):
        return "works on tensors without storage"
    return None


def sources_of(
    seen: Sequence[Tensor],
    arguments: Sequence[Tensor],
    results: Sequence[Tensor],
    stash: Stash,
    is_attention: bool,
) -> list[Source] | None:
    """Return a source for each tensor that autograd saved (`seen`) in a call; None if they would take too much room.

    Attention may save tensors that are no views of arguments (its result, the log-sum-exp), which `stash` stashes. A linear map may
    not: they are copies of its arguments.
    """
    addresses = list(map(storage_address, arguments))
    sources = [_source(tensor, arguments, addresses) for tensor in seen]
    others = sum(size_bytes(tensor) for tensor, source in zip(seen, sources, strict=True) if source is None)
    if others > (_MAX_SAVED_RATIO * sum(map(size_bytes, results)) + 4096 if is_attention else 0):
        return None
    saved: list[Source] = []
    for tensor, source in zip(seen, sources, strict=True):
        stashed = source or stash(tensor)
        if stashed is None:
            return None
        saved.append(stashed)
    return saved


def _source(tensor: Tensor, arguments: Sequence[Tensor], addresses: Sequence[int]) -> _FromArgument | None:
    for index, argument in enumerate(arguments):
        if tensor is argument:
            return _FromArgument(index, None, tensor.dtype)
    address = storage_address(tensor)
    for index, argument in enumerate(arguments):
        if addresses[index] != address or argument.dtype != tensor.dtype:
            continue
        # Arguments that share memory now need not share it in recomputation: a tensor must lie inside its argument.
        (start, stop), (first, last) = span_bytes(tensor), span_bytes(argument)
        if first <= start and stop <= last:
            offset = int(tensor.storage_offset()) - int(argument.storage_offset())
            view = (tensor.shape, tensor.stride(), offset, argument.shape, argument.stride())
            return _FromArgument(index, view, tensor.dtype)
    # A tensor that autocast has cast. Activations are cast before the call, so this is the one weight.
    cast = [i for i, argument in enumerate(arguments) if is_cast_shared(argument) and argument.dtype != tensor.dtype]
    if len(cast) == 1 and autocast_dtype(tensor.device.type) == tensor.dtype:
        weight = arguments[cast[0]]
        if tensor.numel() == weight.numel():
            view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), weight.shape, weight.stride())
            return _FromArgument(cast[0], view, tensor.dtype)
    return None


def is_cast_shared(tensor: Tensor) -> bool:
    """Whether autocast casts a tensor once for all calls: so it does for leaves that require a gradient."""
    return tensor.is_leaf and tensor.requires_grad and tensor.dim() > 1
