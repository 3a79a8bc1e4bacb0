"""Write this process's share of a sharded state as a safetensors file, with digests computed meanwhile.

torch.distributed.checkpoint (DCP) decides which process writes which piece of a tensor. The files are those of its
`HuggingFaceStorageWriter(save_distributed=True)`, which its reader loads. That writer makes two copies of the whole file in host
memory, so this module writes the same bytes piece by piece. Nothing is pickled.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from rlx.checkpoint.manifest import Digest, FileEntry

WRITE_BYTES = 8 << 20
WRITES_AHEAD = 4  # buffers that are written but not yet digested
SHARDING = "DCP_SHARDING_INFO"  # the entry of a file's metadata that torch's reader looks for
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Piece(NamedTuple):
    """A contiguous part of a named tensor that this process writes.

    Attributes:
        name: of the whole tensor.
        offsets: where the part begins in it, one number per dimension.
        tensor: the part. Its storage may be empty while its bytes are in host memory.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


class Source(NamedTuple):
    """A piece and where its bytes are.

    Attributes:
        piece: to write.
        read: returns the bytes, as one-dimensional uint8 tensors in host memory.
        let_go: is called, in a thread, when nobody reads these tensors any more. They may not be on the disk yet.
    """

    piece: Piece
    read: Callable[[], Iterable[Tensor]]
    let_go: Callable[[], None] = lambda: None


def pieces_of(state: Mapping[str, Tensor]) -> list[Piece]:
    """Return the pieces of a sharded state that this process writes; each is written by one process. All processes join."""
    collector = _Collector()
    dcp.save(dict(state), storage_writer=collector, no_dist=False)
    return collector.pieces


class _Collector(dcp.StorageWriter):
    """Takes DCP's plan and writes nothing."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageWriter."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """See StorageWriter."""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Keep the plan's tensors. An uneven division leaves some processes empty parts, which are dropped."""
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            if tensor.numel() or not math.prod(item.tensor_data.size):
                self.pieces.append(Piece(item.index.fqn, tuple(item.tensor_data.chunk.offsets), tensor.detach()))
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See StorageWriter."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def shard_name(rank: int, processes: int) -> str:
    """Return the name of the file that a process writes."""
    return f"shard-{rank + 1:05}-of-{processes:05}.safetensors"


def write_safetensors(path: Path, sources: Iterable[Source]) -> FileEntry:
    """Write a file that safetensors and torch's `HuggingFaceStorageReader` read, and return its manifest entry.

    Each source is read once, in the order of the file, and its bytes are let go soon after. The bytes are on the disk afterwards.

    Source of the format: https://huggingface.co/docs/safetensors, with the offsets of pieces as DCP keeps them.
    """
    # Long types first, so that every tensor begins at a multiple of its type.
    ordered = sorted(sources, key=lambda source: -source.piece.tensor.dtype.itemsize)
    digest, pending = Digest(), deque[Future[None]]()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:

        def put(data: memoryview) -> None:
            for start in range(0, len(data), WRITE_BYTES):
                part = data[start : start + WRITE_BYTES]
                while len(pending) >= WRITES_AHEAD:
                    pending.popleft().result()
                pending.append(hasher.submit(digest.update, part))
                while len(part):
                    part = part[file.write(part) :]

        put(memoryview(_header([source.piece for source in ordered])))
        for source in ordered:
            written = 0
            for part in source.read():
                put(memoryview(part.numpy()))
                written += part.numel()
            assert written == source.piece.tensor.nbytes, f"{source.piece.name}: {written} bytes were read"
            pending.append(hasher.submit(source.let_go))  # after the digests of its bytes
        os.fsync(file.fileno())
        for each in pending:
            each.result()
    return digest.entry()


def _header(pieces: list[Piece]) -> bytes:
    offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in pieces}
    assert len(offsets) == len(pieces), "a process writes one piece of each tensor"
    header: dict[str, Any] = {"__metadata__": {"format": "pt", SHARDING: json.dumps(offsets)}}
    end = 0
    for name, _, tensor in pieces:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
