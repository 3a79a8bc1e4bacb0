"""What travels between a worker and its engine processes: messages as msgpack, weights through a bucket.

The worker unpickles nothing that an engine sends. A bucket is memory that both have: shared memory on the CPU; on a GPU memory that
the engine allocates and the worker maps by CUDA IPC. Its bytes come from the driver, because torch's allocator may have segments
that cannot be mapped, and counts references to what it exports in files that a killed process leaves.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlx.rollout.protocol import Completion

BUCKET_BYTES = 128 << 20


class Answer(NamedTuple):
    """A message from an engine: the reply to a call, completions by number, or class, text and traceback of an error."""

    value: Any = None
    tensor: Tensor | None = None
    stopped: list[tuple[int, Completion]] | None = None
    error: tuple[str, str, str] | None = None


def _plain(tensor: Tensor) -> tuple[str, Sequence[int], bytes]:
    array = tensor.numpy()
    return array.dtype.name, array.shape, array.tobytes()


def _tensor(_: type, plain: Any) -> Tensor:
    name, shape, data = plain
    return torch.from_numpy(np.frombuffer(data, name).reshape(shape).copy())


packed = msgspec.msgpack.Encoder(enc_hook=_plain).encode
unpacked = msgspec.msgpack.Decoder(Answer, dec_hook=_tensor).decode
"""Both with answers; `unpacked` raises msgspec.ValidationError if a message is none."""


class Part(NamedTuple):
    """Bytes of one weight in a bucket: from `start` in the weight, at `offset` in the bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    offset: int
    size: int


def pieces(weights: Iterable[tuple[str, Tensor]], capacity: int = BUCKET_BYTES) -> Iterator[list[tuple[Part, Tensor]]]:
    """Cut weights into lists that fill a bucket; beside each part its bytes."""
    piece: list[tuple[Part, Tensor]] = []
    used = 0
    for name, tensor in weights:
        flat, start = tensor.detach().reshape(-1).view(torch.uint8), 0
        while True:
            size = min(len(flat) - start, capacity - used)
            part = Part(name, tensor.dtype, tuple(tensor.shape), start, used, size)
            piece.append((part, flat[start : start + size]))
            start, used = start + size, used + size
            if used == capacity:
                yield piece
                piece, used = [], 0
            if start == len(flat):
                break
    if piece:
        yield piece


def joined(
    found: Iterable[Sequence[Part]], bucket: Tensor, acknowledge: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights whose parts come through the bucket; call `acknowledge` when the bucket may be written to again.

    Each has memory of its own, because vLLM keeps weights until all those of a layer have arrived.
    """
    weight = torch.empty(0)
    for parts in found:
        complete = []
        for part in parts:
            if part.start == 0:
                weight = torch.empty(part.shape, dtype=part.dtype, device=bucket.device)
            flat = weight.view(-1).view(torch.uint8)
            flat[part.start : part.start + part.size] = bucket[part.offset : part.offset + part.size]
            if part.start + part.size == len(flat):
                complete.append((part.name, weight))
        synchronize(bucket)
        acknowledge()
        yield from complete


def synchronize(bucket: Tensor) -> None:
    """Wait until copies from or to a bucket have ended."""
    if bucket.is_cuda:
        torch.cuda.current_stream(bucket.device).synchronize()


def shared_bucket(descriptor: int) -> Tensor:
    """Return the shared memory of a file as a bucket."""
    return torch.frombuffer(mmap.mmap(descriptor, BUCKET_BYTES), dtype=torch.uint8)


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def _cuda(name: str, *arguments: Any) -> None:
    """Call CUDA's driver, which uses the device that torch uses in this thread."""
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(
            f"{name}: CUDA error {code}; if processes cannot share this GPU, set actor_rollout_ref.rollout.engines_per_gpu=1"
        )


def _bucket_at(address: ctypes.c_uint64, device: torch.device) -> Tensor:
    """Return memory of a device that torch did not allocate."""
    memory = {"shape": (BUCKET_BYTES,), "typestr": "|u1", "data": (address.value, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=device)


def exported_bucket(device: torch.device) -> tuple[Tensor, str]:
    """Allocate a bucket on a device, and return it with the handle by which another process maps it."""
    address, handle = ctypes.c_uint64(), _Handle()
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    _cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(BUCKET_BYTES))
    _cuda("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return _bucket_at(address, device), bytes(handle.reserved).hex()


def mapped_bucket(handle: str, device: torch.device) -> Tensor:
    """Return the bucket of another process."""
    address = ctypes.c_uint64()
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    lazily = ctypes.c_uint(1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
    _cuda("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(bytes.fromhex(handle)), lazily)
    return _bucket_at(address, device)


def unmap(bucket: Tensor) -> None:
    """Give back what `mapped_bucket` mapped."""
    _cuda("cuIpcCloseMemHandle", ctypes.c_uint64(bucket.data_ptr()))
