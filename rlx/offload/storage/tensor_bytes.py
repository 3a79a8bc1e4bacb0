"""The bytes under a tensor and its layout on them: two saved tensors with the same bytes cost one copy.

Note [identity of a saved tensor]
The engine copies a range of bytes of one storage at one version, not a tensor. A tensor and its transpose, or slices of one
fused projection, are views of the same bytes and cost one copy. The allocator reuses addresses, so two ranges are the same only
while the same storage object lives, as a weak reference shows (`OffloadedRange.has_storage_of`). A write through a tensor raises
the version of its views and detached aliases. But the parts that `torch.unsafe_chunk` returns (`nn.GRU` calls it) have a version
counter each. So a tensor that was written to has its own copy, shared only by views of a tensor on the same bytes
(`Region.written_span`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

TENSOR_ALIGN_BYTES = (
    512  # ranges start at a multiple: a fetched tensor has its old alignment, by which kernels are chosen
)


class Region(NamedTuple):
    """`nbytes` from byte `start` of the storage at `address` on `device`, at version `version`.

    `written_span` are the bytes of the tensor that owns the version counter; None at version 0.
    """

    device: torch.device
    address: int
    start: int
    nbytes: int
    version: int
    written_span: tuple[int, int] | None


def span_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage and the one after its last; a stride of 0 adds nothing."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    if tensor.numel() == 0:
        return start, start
    last = sum((int(length) - 1) * int(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def span_length(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    start, stop = span_bytes(tensor)
    return stop - start


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def region_of(tensor: Tensor) -> Region:
    """Return the bytes to copy for a tensor: its whole storage if it spans at least half of it, else its own span."""
    storage = tensor.untyped_storage()
    start, stop = span_bytes(tensor)
    total = storage.nbytes()
    if 2 * (stop - start) >= total:
        start, stop = 0, total
    start -= start % TENSOR_ALIGN_BYTES
    version, base = tensor._version, tensor._base
    written_span = span_bytes(tensor if base is None else base) if version else None
    return Region(tensor.device, storage.data_ptr(), start, stop - start, version, written_span)


def is_plain(tensor: Tensor) -> bool:
    """Return whether storage, offset, shape, stride and dtype describe a tensor completely.

    Not so subclasses, sparse and nested layouts, tensors whose conjugate or negative bit is set, and tensors without memory: those
    inside `torch.func.vmap` or `jvp`, and tangents that are all zeros.
    """
    kind = type(tensor)
    return (
        (kind is Tensor or kind is Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
        and _has_storage(tensor)
    )


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()  # 0 for meta tensors
    except RuntimeError:
        return False
    return True


def is_parameter(tensor: Tensor) -> bool:
    base = tensor._base
    if base is None and type(tensor) is Tensor:  # the common case; asking whether something is a Parameter is slow
        return False
    return isinstance(tensor, Parameter) or isinstance(base, Parameter)


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none (meta tensors, some subclasses)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def version_of(tensor: Tensor) -> int:
    """Return the number of writes that autograd has seen; 0 for a tensor of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


class VersionProbe:
    """The version counter of a plain tensor and of all its views, without the tensor's memory."""

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        self.alias = without_memory(tensor)

    @property
    def is_untouched(self) -> bool:
        return self.alias._version == self.version


class TensorLayout(VersionProbe):
    """Version counter and layout of a plain tensor whose bytes are offloaded."""

    __slots__ = ("_offset", "_stride", "dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset())  # elements from the storage's first byte

    def restore(self, memory: Tensor, first_byte: int) -> Tensor:
        """Return the tensor, with the original's version counter, on `memory`, whose storage begins with its byte `first_byte`."""
        dtype, shape, stride = self.dtype, self.shape, self._stride
        offset = self._offset - first_byte // dtype.itemsize
        found = memory.dtype, memory.shape, memory.stride(), memory.storage_offset()
        if found != (dtype, shape, stride, offset):
            empty = torch.empty(0, dtype=dtype, device=memory.device)
            memory = empty.set_(memory.untyped_storage(), offset, shape, stride)
        tensor = self.alias.detach()
        tensor.data = memory
        return tensor


def without_memory(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    # Assigning to .data replaces the memory of the alias and keeps its version counter.
    alias.data = empty_on(tensor.device)
    return alias


class KeptTensor:
    """A saved tensor that is kept on the device, as an alias: the tensor itself could be an output, which holds its own graph."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def restore(self) -> Tensor:
        tensor = self._tensor
        if tensor._version != self._version:
            raise modified_in_place(tensor.shape, tensor.dtype, self._version, f"but is at version {tensor._version}")
        return tensor


class Packed(Protocol):
    """What a pack hook returns in place of a tensor; `restore` raises RuntimeError if that was written to since."""

    def restore(self) -> Tensor: ...


class MovingWeights(Protocol):
    """Moves weights between devices: `pack` returns what autograd holds in place of one or a view of it (None for any other tensor).

    `present` returns a weight that moves on the device, any other parameter unchanged.
    """

    def pack(self, tensor: Tensor) -> Packed | None: ...
    def present(self, parameter: Tensor) -> Tensor: ...


moving_weights: list[MovingWeights] = []  # those that move weights now; mostly none


def kept(tensor: Tensor) -> Packed:
    packed = (mover.pack(tensor) for mover in moving_weights)
    return next(filter(None, packed), None) or KeptTensor(tensor)


def present(parameter: Tensor) -> Tensor:
    """Return a parameter for backward."""
    for mover in moving_weights:
        parameter = mover.present(parameter)
    return parameter


def restore(packed: Packed) -> Tensor:
    return packed.restore()


def weights_are_refetched() -> AbstractContextManager[Any]:
    """Return a context in which autograd saves `MovingWeights.pack` of each weight that moves; other tensors as usual."""
    return saved_tensors_hooks(kept, restore) if moving_weights else nullcontext()


@functools.cache
def empty_on(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def modified_in_place(shape: Sequence[int], dtype: torch.dtype, saved: int, found: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{dtype} tensor of shape {list(shape)} was saved at version {saved}, {found}. "
        "Write out of place, or clone the tensor before the write"
    )
