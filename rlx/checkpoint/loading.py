"""Load tensors that `tensors.py` wrote, after comparing them with those that they shall fill."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from rlx.checkpoint.manifest import CheckpointError, few

MOST_NAMED = 3
MASTER_ENDING = ".master"  # ends the names of fp32 copies of weights


def load(state: Mapping[str, Tensor], folder: Path, of_optimizer: bool = False) -> set[str]:
    """Fill the tensors of a sharded state in place; all processes join. Any number of processes may have written the folder.

    With `of_optimizer` names share all but the last part if they belong to one parameter. The folder may then lack parameters, and
    have some that `state` lacks. It may lack masters, which stay as they are, and its numbers may be of a narrower type.

    Args:
        state: by name; DTensors, or plain tensors.
        folder: checked against its manifest before.
        of_optimizer: the state is an optimizer's.

    Returns:
        What the names of parameters share that the folder lacks; their tensors are unchanged.

    Raises:
        CheckpointError: names, shapes, types or numbers of elements differ, or the files cannot be read.
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
        raise CheckpointError(f"{folder}: {few(mixed, MOST_NAMED)}; expected one type")
    return reader, metadata


def _require_same(state: Mapping[str, Tensor], metadata: Metadata, folder: Path, within: set[str]) -> None:
    """Compare before loading: DCP would fill tensors in part, convert types, and leave missing pieces as they are.

    Args:
        within: groups of the folder's tensors that `state` must have.
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
        elif any(map(_overlap, chunks, chunks[1:])):
            faults.append(f"{name}: two of its pieces overlap, so others are missing")
        elif any(offset < 0 for chunk in chunks for offset in chunk.offsets):
            faults.append(f"{name}: a piece lies outside of it")
    if faults:
        raise CheckpointError(f"{folder} does not fit: {few(faults, MOST_NAMED)}")


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(first < then + its_size and then < first + size for first, size, then, its_size in boxes)
