"""What recomputation needs to answer a call instead of running it: see `rlx.offload.replay.replay_mode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.recompute.ambient_state import RandomState, has_autocast
from rlx.offload.recompute.stash import StashedTensor
from rlx.offload.runtime.pytree import map_leaves, tensors_in
from rlx.offload.storage.regions import VersionProbe, is_plain, size_bytes, span_bytes, storage_address

# Attention that saves more than this many times its result beside its arguments is no fused kernel: it saves the scores.
_MAX_SAVED_RATIO = 2.0

Save = Callable[[Tensor], StashedTensor | None]  # stores a tensor; None where there is no room for it


class LayerRecording(Protocol):
    """What a watch needs of the layer call whose forward it sees."""

    @property
    def slot_count(self) -> int:
        """How many tensors autograd has saved so far."""

    def saved_since(self, slot: int) -> list[Tensor]:
        """The tensors of the slots from `slot` on."""

    def store(self, tensor: Tensor) -> StashedTensor | None:
        """Send a tensor off, or keep it if it is small; None where the host has no room."""

    def keep(self, tensor: Tensor) -> StashedTensor:
        """Keep a tensor on the device."""

    def random_state(self) -> RandomState:
        """The state of the random generators."""


class _FromArgument(NamedTuple):
    """A saved tensor that is an argument of the call, or looks at an argument's memory.

    Args:
        argument: which argument.
        look: None for the argument itself; else shape and stride of the saved tensor and, in elements, how far behind the
            argument's first element it begins; then shape and stride of the argument.
        dtype: what the argument is cast to before, as autocast does.
    """

    argument: int
    look: tuple[torch.Size, tuple[int, ...], int, torch.Size, tuple[int, ...]] | None
    dtype: torch.dtype

    def of(self, arguments: Sequence[Tensor]) -> Tensor | None:
        """The tensor, from the arguments of now; None if the argument does not lie as it did."""
        argument = arguments[self.argument].detach()
        if self.look is None:
            return argument
        shape, stride, behind, argument_shape, argument_stride = self.look
        if argument.shape != argument_shape or argument.stride() != argument_stride:
            return None
        argument = argument.to(self.dtype)
        return argument.as_strided(shape, stride, int(argument.storage_offset()) + behind)


class CachedOp:
    """What is left of a call: enough to fill its slots and to hand out its result without running it.

    Args:
        function: what was called.
        first_slot: how many tensors autograd had saved before.
        arguments: the tensors among the arguments.
        saved: what autograd saved in the call, in order.
        result: what it returned.
    """

    __slots__ = ("_parameters", "_probes", "_result", "_saved", "first_slot", "function", "random_state")

    def __init__(
        self,
        function: Any,
        first_slot: int,
        arguments: Sequence[Tensor],
        saved: list[_FromArgument | StashedTensor],
        result: Any,
    ) -> None:
        self.function = function
        self.first_slot = first_slot
        self.random_state: RandomState | None = None
        self._parameters = [(i, argument) for i, argument in enumerate(arguments) if type(argument) is Parameter]
        self._saved = saved
        self._probes = [VersionProbe(tensor) for tensor in tensors_in(result)]
        self._result: Any = None

    @property
    def next_slot(self) -> int:
        """How many tensors autograd had saved after the call."""
        return self.first_slot + len(self._saved)

    def store_result(self, save: Save, result: Any) -> bool:
        """Send the result off or keep it; False where the layer has written to it, or there is no room."""
        has_room = True

        def store(leaf: Any) -> Any:
            nonlocal has_room
            if not isinstance(leaf, Tensor):
                return leaf
            stored = save(leaf)
            has_room = has_room and stored is not None
            return stored

        if not self.is_result_untouched:
            return False
        self._result = map_leaves(store, result)
        return has_room

    @property
    def is_result_untouched(self) -> bool:
        """Whether the layer has not written to the result."""
        return all(probe.is_untouched for probe in self._probes)

    @property
    def is_whole(self) -> bool:
        """Whether what was stored is there as it was."""
        results: list[StashedTensor] = []
        map_leaves(lambda leaf: results.append(leaf) if isinstance(leaf, StashedTensor) else None, self._result)
        saved = (value for value in self._saved if isinstance(value, StashedTensor))
        return all(value.is_whole for value in (*saved, *results))

    def saved(self, arguments: Sequence[Tensor]) -> list[Tensor] | None:
        """What autograd would save, in order; None if the arguments are not what they were."""
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
        """The result, ready for the current stream."""
        return map_leaves(lambda leaf: leaf.tensor() if isinstance(leaf, StashedTensor) else leaf, self._result)


class DeadOp(CachedOp):
    """What is left of an operation whose result nobody reads: its slots are filled, its result is memory with nothing in it."""

    __slots__ = ("_device", "_dtype", "_requires_grad", "_shape", "_stride")

    def __init__(
        self,
        function: Any,
        first_slot: int,
        arguments: Sequence[Tensor],
        saved: list[_FromArgument | StashedTensor],
        result: Tensor,
    ) -> None:
        super().__init__(function, first_slot, arguments, saved, result)
        self._shape, self._stride, self._dtype = result.shape, result.stride(), result.dtype
        self._device, self._requires_grad = result.device, result.requires_grad

    def result(self, poison: bool = False) -> Tensor:
        """Something that looks like the result; `poison`: full of NaN."""
        empty = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)
        if poison:
            empty.fill_(torch.nan)
        return empty.requires_grad_(self._requires_grad)


def why_not_cacheable(tensors: Sequence[Tensor]) -> str | None:
    """Why a call with such arguments and results cannot be answered; None if it can."""
    if not all(map(is_plain, tensors)):
        return "works on subclasses of tensors"
    if not all(map(storage_address, tensors)):
        return "works on tensors without memory"
    return None


def sources_of(
    seen: Sequence[Tensor],
    arguments: Sequence[Tensor],
    results: Sequence[Tensor],
    save: Save,
    is_attention: bool,
) -> list[_FromArgument | StashedTensor] | None:
    """Where what autograd saved in a call will come from; None if it would cost too much room.

    Args:
        seen: what it saved.
        arguments, results: tensors among those of the call.
        save: stores what looks at no argument.
        is_attention: attention may save other tensors; a linear map may not, for those are copies of its arguments.
    """
    addresses = list(map(storage_address, arguments))
    sources = [_source(tensor, arguments, addresses) for tensor in seen]
    others = sum(size_bytes(tensor) for tensor, source in zip(seen, sources, strict=True) if source is None)
    if others > (_MAX_SAVED_RATIO * sum(map(size_bytes, results)) + 4096 if is_attention else 0):
        return None
    saved: list[_FromArgument | StashedTensor] = []
    for tensor, source in zip(seen, sources, strict=True):
        stored = source or save(tensor)
        if stored is None:
            return None
        saved.append(stored)
    return saved


def _source(tensor: Tensor, arguments: Sequence[Tensor], addresses: Sequence[int]) -> _FromArgument | None:
    for index, argument in enumerate(arguments):
        if tensor is argument:
            return _FromArgument(index, None, tensor.dtype)
    address = storage_address(tensor)
    for index, argument in enumerate(arguments):
        if addresses[index] != address or argument.dtype != tensor.dtype:
            continue
        # Arguments that share memory now need not share it in recomputation: each answers for its own span only.
        (start, stop), (first, last) = span_bytes(tensor), span_bytes(argument)
        if first <= start and stop <= last:
            behind = int(tensor.storage_offset()) - int(argument.storage_offset())
            return _FromArgument(
                index, (tensor.shape, tensor.stride(), behind, argument.shape, argument.stride()), tensor.dtype
            )
    # What autocast has cast: activations are cast before the call, so it is the one weight.
    cast = [i for i, argument in enumerate(arguments) if is_cast_shared(argument) and argument.dtype != tensor.dtype]
    if len(cast) == 1 and autocast_dtype(tensor.device.type) == tensor.dtype:
        weight = arguments[cast[0]]
        if tensor.numel() == weight.numel():
            look = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), weight.shape, weight.stride())
            return _FromArgument(cast[0], look, tensor.dtype)
    return None


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to on a type of device; None where it is off."""
    if not has_autocast(device_type):
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def is_cast_shared(tensor: Tensor) -> bool:
    """Whether autocast casts a tensor once for all calls: the leaves that want a gradient."""
    return tensor.is_leaf and tensor.requires_grad and tensor.dim() > 1
