"""Write this process's share of a sharded state as a safetensors file, with digests computed meanwhile; and load such files.

torch.distributed.checkpoint (DCP) decides which process writes which piece of a tensor. The files are those of its
`HuggingFaceStorageWriter(save_distributed=True)`, which its reader loads. That writer makes two copies of the whole file in host
memory, so this module writes the same bytes piece by piece. Nothing is pickled.
"""

import json
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from rlx.checkpoint.manifest import CheckpointError, Digest, FileEntry, few

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
MASTER_ENDING = ".master"  # ends the names of fp32 copies of weights


class Piece(NamedTuple):
    """A contiguous part of a named tensor that this process writes."""

    name: str  # of the whole tensor
    offsets: tuple[int, ...]  # where the part begins in it, one number per dimension
    tensor: Tensor  # the part; its storage may be empty while its bytes are in host memory


class Source(NamedTuple):
    """A piece to write, and where its bytes are."""

    piece: Piece
    read: Callable[[], Iterable[Tensor]]  # returns the bytes, as one-dimensional uint8 tensors in host memory
    # Is called in a thread once these tensors have been read, though they may not be on the disk yet.
    let_go: Callable[[], None] = lambda: None


def pieces_of(state: Mapping[str, Tensor]) -> list[Piece]:
    """Return the pieces of a sharded state that this process writes; each is written by one process. All processes join.

    The plan is DCP's. An uneven division leaves some processes empty parts, which are dropped.
    """
    planner, is_first = dcp.DefaultSavePlanner(), dist.get_rank() == 0
    planner.set_up_planner(dict(state), is_coordinator=is_first)
    plans: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(planner.create_local_plan(), plans)
    own: list[Any] = [None]
    dist.scatter_object_list(own, planner.create_global_plan(plans)[0] if plans else None)
    pieces = []
    for item in planner.finish_plan(own[0]).items:
        assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        if tensor.numel() or not math.prod(item.tensor_data.size):
            pieces.append(Piece(item.index.fqn, tuple(item.tensor_data.chunk.offsets), tensor.detach()))
    return pieces


def shard_name(rank: int, processes: int) -> str:
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


def load(state: Mapping[str, Tensor], folder: Path, of_optimizer: bool = False) -> set[str]:
    """Fill the tensors of a sharded state in place; all processes join. Any number of processes may have written the folder.

    With `of_optimizer` names share all but the last part if they belong to one parameter. The folder may then lack parameters, and
    have some that `state` lacks. It may lack masters, which stay as they are, and its numbers may be of a narrower type.

    Returns what the names of parameters share that the folder lacks; their tensors are unchanged. Raises CheckpointError if names,
    shapes, types or numbers of elements differ, or the files cannot be read.
    """
    reader, metadata = _opened(folder)
    entries, lacking, within = metadata.state_dict_metadata, set(), {_group(n) for n in metadata.state_dict_metadata}
    narrow: dict[str, Tensor] = {}
    if of_optimizer:
        lacking = {_group(name) for name in state} - within
        kept = {n: t for n, t in state.items() if _group(n) not in lacking}
        state = {n: t for n, t in kept.items() if n in entries or not n.endswith(MASTER_ENDING)}
        within = {_group(name) for name in state}
        types = {name: _narrower(entries.get(name), tensor) for name, tensor in state.items()}
        narrow = {name: torch.empty_like(state[name], dtype=kind) for name, kind in types.items() if kind}
    read = {**state, **narrow}
    _require_same(read, metadata, folder, within)
    try:
        dcp.load(read, storage_reader=reader)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder}: cannot be loaded ({type(cause).__name__}: {cause})") from None
    for name, tensor in narrow.items():
        state[name].copy_(tensor)
    return lacking


def load_all(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder on the CPU; works in a single process without process group."""
    reader, metadata = _opened(folder)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _require_same(state, metadata, folder, within={_group(name) for name in state})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: one process reads
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _group(name: str) -> str:
    return name.rpartition(".")[0]


def _narrower(entry: Any, tensor: Tensor) -> torch.dtype | None:
    """Return the type of a stored tensor if it is another one whose numbers the given tensor can hold, else None."""
    kept = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else tensor.dtype
    fits = kept.is_floating_point and torch.promote_types(kept, tensor.dtype) == tensor.dtype
    return kept if fits and kept != tensor.dtype else None


def _opened(folder: Path) -> tuple[dcp.StorageReader, Metadata]:
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        metadata = reader.read_metadata()
        types: dict[str, set[str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    types.setdefault(name, set()).add(file.get_slice(name).get_dtype())
    except Exception as error:  # safetensors and json raise many kinds
        raise CheckpointError(f"{folder}: cannot be read ({type(error).__name__}: {error})") from None
    # The reader takes the type of one piece for that of all, and would convert the others' bits.
    if mixed := [f"{name}: got pieces of {' and '.join(sorted(own))}" for name, own in types.items() if len(own) > 1]:
        raise CheckpointError(f"{folder}: {few(mixed)}; expected one type")
    return reader, metadata


def _require_same(state: Mapping[str, Tensor], metadata: Metadata, folder: Path, within: set[str]) -> None:
    """Compare before loading: DCP would fill tensors in part, convert types, and leave missing pieces as they are.

    `within` are groups of the folder's tensors that `state` must have.
    """
    entries = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and _group(name) in within
    }
    faults = [f"{name} is not in it" for name in sorted(set(state) - set(entries))]
    faults += [f"{name} is not in this model" for name in sorted(set(entries) - set(state))]
    for name in sorted(set(state) & set(entries)):
        tensor, entry = state[name], entries[name]
        chunks = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets))
        held = sum(chunk.sizes.numel() for chunk in chunks)
        if tuple(entry.size) != tuple(tensor.shape):
            faults.append(f"{name}: got shape {tuple(entry.size)}, expected {tuple(tensor.shape)}")
        elif entry.properties.dtype != tensor.dtype:
            faults.append(f"{name}: got {entry.properties.dtype}, expected {tensor.dtype} (fsdp_config.model_dtype)")
        elif held != tensor.shape.numel():
            faults.append(f"{name}: got {held} elements, expected {tensor.shape.numel()}")
        elif any(_overlap(one, other) for n, one in enumerate(chunks) for other in _beside(one, chunks[n + 1 :])):
            faults.append(f"{name}: two of its pieces overlap, so others are missing")
        elif any(offset < 0 for chunk in chunks for offset in chunk.offsets):
            faults.append(f"{name}: a piece lies outside of it")
    if faults:
        raise CheckpointError(f"{folder} does not fit: {few(faults)}")


def _beside(one: ChunkStorageMetadata, later: Sequence[ChunkStorageMetadata]) -> Iterator[ChunkStorageMetadata]:
    """Yield the pieces behind one, in order of their offsets, that begin before it ends in the first dimension."""
    return takewhile(lambda other: not one.sizes or other.offsets[0] < one.offsets[0] + one.sizes[0], later)


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(first < then + its_size and then < first + size for first, size, then, its_size in boxes)
