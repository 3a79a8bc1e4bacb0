"""Sizes and digests of a folder's files: written last, and checked before anything else in the folder is read.

A folder with a `manifest.json` is whole, because the manifest is written after all other files::

    {"format": 2, "files": {"checkpoint.json": {"bytes": 210, "xxh3_128": ["9f0c…"]}, "model/shard-00001-of-00002.safetensors": …}}

Each digest covers CHUNK_BYTES of a file, so that several processes and threads can share the check of a long file. A folder inside
may have a manifest of its own; the outer manifest then lists that manifest instead of the files below. xxh3 finds damage, not
forgery. Nothing that is read from a checkpoint is executed, so a forged file can change numbers but runs no code.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rlx.checkpoint.folders import MANIFEST
from rlx.errors import ExplainedError

FORMAT = 2
CHUNK_BYTES = 64 << 20
READ_BYTES = 8 << 20
SMALL_BYTES = 16 << 20
"""Files up to this size are read in full by the quick check: JSON and tokenizers, but hardly any weights."""
THREADS = 4
MOST_MISSING = 100


class CheckpointError(ExplainedError, ValueError):
    """A checkpoint lacks a part that the reader needs, or is damaged."""


class OtherVersionError(CheckpointError):
    """Another version of rlx wrote a part, so that the checkpoint may be whole although this version cannot read it."""


def few(faults: Sequence[str], most: int = 3) -> str:
    return "; ".join(faults[:most]) + (f"; and {len(faults) - most} more" if len(faults) > most else "")


def is_count(value: object) -> bool:
    """Whether a value of a JSON file is a whole number from 0 on that 64 bits hold."""
    return type(value) is int and 0 <= value < 1 << 63


class FileEntry(NamedTuple):
    """A manifest's entry for a file: its length, and the digest of each chunk."""

    nbytes: int
    digests: tuple[str, ...]


class Digest:
    """Digests of a file that is written or read in order."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._chunk = xxhash.xxh3_128()
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        while len(data):
            part = data[: CHUNK_BYTES - self._nbytes % CHUNK_BYTES]
            self._chunk.update(part)
            self._nbytes += len(part)
            if self._nbytes % CHUNK_BYTES == 0:
                self._close_chunk()
            data = data[len(part) :]

    def entry(self) -> FileEntry:
        if self._nbytes % CHUNK_BYTES or not self._done:
            self._close_chunk()
        return FileEntry(self._nbytes, tuple(self._done))

    def _close_chunk(self) -> None:
        self._done.append(self._chunk.hexdigest())
        self._chunk = xxhash.xxh3_128()


def seal(folder: Path, known: Mapping[str, FileEntry]) -> None:
    """Write the manifest of a folder that is otherwise complete. The file system has everything on its disk afterwards.

    Folders inside with a manifest of their own are listed by that alone. Files without `known` entries, whose digests were computed
    while they were written, are read. Raises CheckpointError if a known file is not in the folder.
    """
    files, names = {}, set(_names(folder))
    if unseen := sorted(set(known) - names):
        raise CheckpointError(
            f"{folder / unseen[0]}: another process wrote it, but it is not in the folder that this process sees; all nodes need "
            "the same file system for checkpoints"
        )
    for name in sorted(names):
        files[name] = known.get(name) or _entry_of(folder / name)
        if name not in known:
            _sync(folder / name)
    described = {name: {"bytes": entry.nbytes, "xxh3_128": list(entry.digests)} for name, entry in files.items()}
    half = folder / f".{MANIFEST}.part"
    half.write_text(json.dumps({"format": FORMAT, "files": described}, indent=1) + "\n")
    for path in (half, *{(folder / name).parent for name in files}, folder):
        _sync(path)
    os.replace(half, folder / MANIFEST)
    _sync(folder)


def damage(folder: Path) -> list[str]:
    """Return what is wrong with a sealed folder, as far as names, sizes and small files show it; quick.

    A folder without a manifest is damaged too. Raises OtherVersionError if a later version of rlx wrote a manifest; OSError if a file
    cannot be read, which does not mean that it is damaged.
    """
    faults = []
    for below, name, entry in _listed(folder, faults):
        path = below / name
        if (found := path.stat().st_size) != entry.nbytes:
            faults.append(f"{path}: got {found} bytes, expected {entry.nbytes}")
        elif entry.nbytes <= SMALL_BYTES:
            faults += filter(None, (_fault_of_chunk((path, 0, digest)) for digest in entry.digests[:1]))
    return sorted(faults)


def damaged_chunks(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Return the chunks whose digests are wrong, among this `part` of `parts` of all chunks; reads that share of the folder.

    Raises CheckpointError if a file is not as the manifests list it (another process may see another file system); OSError as `damage`.
    """
    unreadable: list[str] = []
    chunks = [
        (below / name, number, digest)
        for below, name, entry in _listed(folder, unreadable)
        for number, digest in enumerate(entry.digests)
    ]
    if unreadable:
        raise CheckpointError("; ".join(unreadable[:3]))
    with ThreadPoolExecutor(THREADS) as pool:
        return [fault for fault in pool.map(_fault_of_chunk, chunks[part::parts]) if fault]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError, which names the file, if there is none; OSError if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: got a JSON {type(found).__name__}, expected an object")
    return found


def require_keys(path: Path, found: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Raise OtherVersionError if the keys of an object that was read from an undamaged file are not those that this version writes."""
    lacking, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if lacking or unknown:
        parts = [f"has no {', '.join(lacking)}"] * bool(lacking)
        parts += [f"has {', '.join(unknown)[:80]}, which this version does not know"] * bool(unknown)
        raise OtherVersionError(
            f"{path}: was written by another version of rlx: it {' and '.join(parts)}; resume with that version"
        )


def _listed(folder: Path, faults: list[str]) -> Iterator[tuple[Path, str, FileEntry]]:
    """Yield (folder, name, entry) of all files that the folder's manifests list; append what is wrong with the lists."""
    try:
        files = _read_manifest(folder)
    except OtherVersionError:
        raise
    except CheckpointError as error:
        faults.append(str(error))
        return
    names = set(_names(folder))
    faults += [f"{folder / name}: is not in the manifest; remove it" for name in sorted(names - set(files))]
    faults += [f"{folder / name}: is missing" for name in sorted(set(files) - names)[:MOST_MISSING]]
    for name in sorted(names & set(files)):
        inner = folder / name
        if inner.is_symlink():
            faults.append(f"{inner}: is a symbolic link; put the file there")
        elif not inner.is_file():
            faults.append(f"{inner}: is missing, what has its name is no file")
        else:
            yield folder, name, files[name]
            if inner.name == MANIFEST:
                yield from _listed(inner.parent, faults)


def _read_manifest(folder: Path) -> dict[str, FileEntry]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing; it is written last, so the folder is unfinished or no checkpoint")
    found = read_json(path)
    if (got := found.get("format")) != FORMAT:
        later = isinstance(got, int) and got > FORMAT
        text = f"got format {str(got)[:40]}, this version reads {FORMAT}"
        if later:
            raise OtherVersionError(f"{path}: was written by a later version of rlx: {text}")
        raise CheckpointError(f"{path}: is damaged: {text}")
    try:
        files = {}
        for name, entry in found["files"].items():
            digests = tuple(entry["xxh3_128"])
            if not is_count(entry["bytes"]) or not all(isinstance(digest, str) for digest in digests):
                raise TypeError
            if len(digests) != max(1, -(-entry["bytes"] // CHUNK_BYTES)) or ".." in name.split("/") or name[:1] == "/":
                raise ValueError
            files[name] = FileEntry(entry["bytes"], digests)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path}: is no manifest that rlx wrote: its entries are damaged") from None
    return files


def _names(folder: Path) -> Iterator[str]:
    """Yield the files below a folder as a manifest names them, without its own manifest."""
    for place, folders, files in os.walk(folder):
        below = Path(place).relative_to(folder)
        if place != str(folder) and MANIFEST in files:
            folders.clear()  # the inner manifest lists the rest
            files = [MANIFEST]
        for name in files:
            if (below / name).as_posix() != MANIFEST:
                yield (below / name).as_posix()
        for name in folders:
            if (Path(place) / name).is_symlink():
                yield (below / name).as_posix()  # never listed, so it is a fault


def _entry_of(path: Path) -> FileEntry:
    digest = Digest()
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            digest.update(memoryview(data))
    return digest.entry()


def _fault_of_chunk(chunk: tuple[Path, int, str]) -> str | None:
    path, number, expected = chunk
    start, digest = number * CHUNK_BYTES, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = CHUNK_BYTES
        while left and (data := file.read(min(left, READ_BYTES))):
            digest.update(data)
            left -= len(data)
    if digest.hexdigest() == expected:
        return None
    return f"{path}: bytes {start} to {start + CHUNK_BYTES - left} have changed since they were written"


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
