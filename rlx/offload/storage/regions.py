"""Which bytes a tensor stands on and how it looks at them: what makes two saved tensors the same one.

Note [identity of a saved tensor]
What moves is a range of bytes of one storage at one version, not a tensor: a tensor and its transpose, or the slices of
one fused projection, are looks at the same bytes and cost one copy. An address says nothing once its storage has died,
for the allocator hands it out again; so a range is the same only while the very storage object lives, which a weak
reference to it tells without keeping its memory (see `OffloadedRange.has_storage_of`). Bytes change only with the version counter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

# Ranges start at a multiple of this, so that a tensor that comes back is aligned as it was: kernels choose by alignment.
TENSOR_ALIGN_BYTES = 512


class Region(NamedTuple):
    """`nbytes` from byte `start` of the storage at `address` on `device`, as they stood at `version`."""

    device: torch.device
    address: int
    start: int
    nbytes: int
    version: int


def span_bytes(tensor: Tensor) -> tuple[int, int]:
    """First byte and the one after the last that a tensor looks at; a stride of 0 adds nothing."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    if tensor.numel() == 0:
        return start, start
    last = sum((int(length) - 1) * int(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def span_length(tensor: Tensor) -> int:
    """How many bytes there are from the first to the last that a tensor looks at."""
    if tensor.is_contiguous():
        return tensor.nbytes
    start, stop = span_bytes(tensor)
    return stop - start


def size_bytes(tensor: Tensor) -> int:
    """Size of a tensor written out in full, whatever its layout [bytes]."""
    return tensor.numel() * tensor.element_size()


def region_of(tensor: Tensor) -> Region:
    """The bytes that move with a tensor: its whole storage where it looks at half of it or more, else its own span."""
    storage = tensor.untyped_storage()
    start, stop = span_bytes(tensor)
    total = storage.nbytes()
    if 2 * (stop - start) >= total:
        start, stop = 0, total
    start -= start % TENSOR_ALIGN_BYTES
    return Region(tensor.device, storage.data_ptr(), start, stop - start, tensor._version)


def is_plain(tensor: Tensor) -> bool:
    """Whether storage, offset, shape, stride and dtype say everything about a tensor.

    They do not for subclasses (DTensor, quantised weights), sparse and nested layouts, and for tensors whose conjugate
    or negative bit is set.
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
    )


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    base = tensor._base
    if base is None and type(tensor) is Tensor:  # the common case; asking whether something is a Parameter is slow
        return False
    return isinstance(tensor, Parameter) or isinstance(base, Parameter)


def storage_address(tensor: Tensor) -> int:
    """Address of a tensor's storage; 0 where it has none (meta tensors, subclasses without one)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class VersionProbe:
    """Watches a plain tensor's version counter without keeping its memory.

    The probe shares the counter with the tensor and every view of it, as autograd's own check does.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        self.alias = without_memory(tensor)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been written to the tensor or its views since."""
        return self.alias._version == self.version


class TensorLayout(VersionProbe):
    """What is left of a plain tensor whose bytes have moved: its version counter, and how it looked at its storage."""

    __slots__ = ("_offset", "_stride", "dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        self.alias = without_memory(tensor)
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset())  # elements from the storage's first byte

    def restore(self, memory: Tensor, first_byte: int) -> Tensor:
        """The tensor on memory that has come back.

        It has the counter: who writes to what has come back writes to all that looked at the original.

        Args:
            memory: any tensor on a storage that begins with byte `first_byte` of the one that it was saved from.
            first_byte: a multiple of `TENSOR_ALIGN_BYTES`.
        """
        dtype, shape, stride = self.dtype, self.shape, self._stride
        offset = self._offset - first_byte // dtype.itemsize
        if (
            memory.dtype != dtype
            or memory.shape != shape
            or memory.stride() != stride
            or memory.storage_offset() != offset
        ):
            empty = torch.empty(0, dtype=dtype, device=memory.device)
            memory = empty.set_(memory.untyped_storage(), offset, shape, stride)
        tensor = self.alias.detach()
        tensor.data = memory
        return tensor


def without_memory(tensor: Tensor) -> Tensor:
    """An alias of a plain tensor that keeps nothing of it but the version counter."""
    alias = tensor.detach()
    # Assigning to .data swaps the memory below the alias and leaves its version counter alone.
    alias.data = empty_on(tensor.device)
    return alias


@functools.cache
def empty_on(device: torch.device) -> Tensor:
    """An empty tensor on a device, the same one each time."""
    return torch.empty(0, device=device)


def modified_in_place(shape: Sequence[int], dtype: torch.dtype, saved: int, found: str) -> RuntimeError:
    """The error autograd raises for a write to a saved tensor."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{dtype} tensor of shape {list(shape)} was saved at version {saved}, {found}. "
        "Write out of place, or clone the tensor before the write"
    )
