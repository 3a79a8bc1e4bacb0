"""Write an engine's state to a checkpoint during training: a thread writes bytes that do not change meanwhile.

Note [who waits for a save]
`begin` copies device memory to staging in the arena, and waits for these copies. Bytes that are in host memory already, of a
`TensorOffload` or FSDP's own CPU offload, are written from where they are, before all others: these are the *live* bytes. The
optimizer's step, which changes them, waits until they are read, not until they are on disk. Frozen weights that stream from host
memory never change. They are neither copied nor waited for.

If the host has no room for staging, `begin` writes before it returns, one tensor at a time.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.checkpoint import folders
from rlx.checkpoint.manifest import FileEntry, seal
from rlx.checkpoint.tensors import Piece, Source, pieces_of, shard_name, write_safetensors
from rlx.engine.fsdp_units import gathered
from rlx.engine.host_offload import TensorOffload, obtainable_bytes, range_of
from rlx.errors import ExplainedError, StorageError, storing
from rlx.offload import Block, HostArena, trim

Entries = dict[str, FileEntry]
Parts = Mapping[str, Mapping[str, Tensor]]
logger = logging.getLogger(__name__)


NOTICEABLE_S = 1.0


class _LiveBytes:
    """Host memory that a save reads in place; `read` is done when all `pieces` are read or the save has failed."""

    def __init__(self) -> None:
        self.read: Future[None] = Future()
        self.pieces = 0

    def let_go(self) -> None:
        self.pieces -= 1
        if not self.pieces:
            self.give_up()

    def give_up(self, *_: object) -> None:
        if not self.read.done():
            self.read.set_result(None)


class _PendingSave(NamedTuple):
    """A pending save: its folder, when its live bytes are read, all jobs, and whether training goes on meanwhile."""

    folder: Path
    live_read: Future[None]
    jobs: list[Future[Entries]]
    in_background: bool


class _LocatedPiece(NamedTuple):
    """A piece and where its bytes are: in host memory as these parts, which may be live, or on the device."""

    piece: Piece
    on_host: list[Tensor] | None
    live: _LiveBytes | None = None

    def source(self) -> Source:
        if (parts := self.on_host) is not None:
            return Source(self.piece, lambda: parts, *([self.live.let_go] if self.live else []))
        # A copy on the CPU too, because a tensor that numpy has seen cannot be resized, and so not be offloaded, any more.
        return Source(self.piece, lambda: [_bytes(self.piece.tensor).to("cpu", copy=True)])


class CheckpointWriter:
    """Writes the sharded state of one role, one save at a time. All processes call `begin` and `finish` together."""

    def __init__(self, arena: HostArena, name: str, device: torch.device):
        self._arena, self._name, self._device = arena, name, device
        self._account = arena.account(name=f"{name}_checkpoint")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-checkpoint")
        self._pending: _PendingSave | None = None

    def begin(
        self,
        folder: Path,
        parts: Parts,
        offloads: Sequence[TensorOffload],
        in_background: bool,
        frozen: Set[torch.UntypedStorage] = frozenset(),
    ) -> Path:
        """Start to write a role's folder, and return the folder to write other files into before `finish`.

        `parts` are the state by the name of its folder, `frozen` is memory of the host that never changes. In the background this
        returns as soon as no byte on the device is needed any more. Raises StorageError if the disk has no room.
        """
        assert self._pending is None, "the previous save has not finished"
        partial = folders.partial_of(folder)
        pieces = {part: pieces_of(state) for part, state in parts.items()}
        needed_bytes = sum(gathered(sum(piece.tensor.nbytes for each in pieces.values() for piece in each)))
        _raise_everywhere(folder, lambda: _make_folders(folder, [*parts], needed_bytes))
        found, live = _find_all(pieces, offloads, self._device, frozen)
        block = None
        if in_background:
            found, block = self._stage(found)
        if self._device.type != "cpu":  # copies to host memory, of these and of an offload before, may still run
            torch.accelerator.current_stream(self._device).synchronize()
        in_background = in_background and all(f.on_host is not None for each in found.values() for f in each)
        for offload in offloads:
            offload.keep_until(live.read)
        first = {part: each for part, each in found.items() if any(f.live for f in each)}
        write_live = self._thread.submit(_write, partial, first)
        write_live.add_done_callback(live.give_up)
        write_rest = self._thread.submit(
            _write, partial, {part: each for part, each in found.items() if part not in first}
        )
        if block is not None:
            write_rest.add_done_callback(lambda _: self._account.free(block))
        self._pending = _PendingSave(folder, live.read, [write_live, write_rest], in_background)
        if not in_background:
            wait(self._pending.jobs)
        return partial

    def write_extra_files(self, write: Callable[[], Entries]) -> None:
        """Let this process write other files of the save too, in the background if that is; `finish` raises its errors."""
        assert self._pending is not None
        self._pending.jobs.append(self._thread.submit(write))
        if not self._pending.in_background:
            wait(self._pending.jobs)

    @property
    def is_written(self) -> bool:
        return self._pending is None or all(job.done() for job in self._pending.jobs)

    def before_step(self) -> None:
        """Wait until a save has read what it reads in place, because the optimizer may change it."""
        if self._pending is None:
            return
        began = time.monotonic()
        wait([self._pending.live_read])
        if (seconds := time.monotonic() - began) > NOTICEABLE_S:
            text = "%s: the optimizer's step waited %.1f s until its state in host memory was in the checkpoint"
            logger.info(text, self._name, seconds)

    def finish(self) -> None:
        """Wait for the thread, write the manifest and let the folder appear; do nothing if there is no save.

        Raises CheckpointError, StorageError if the write failed on a process; what was written is removed.
        """
        if self._pending is None:
            return
        folder, jobs = self._pending.folder, self._pending.jobs
        self._pending = None
        wait(jobs)
        entries: Entries = {}

        def seal_all() -> None:
            seal(folders.partial_of(folder), entries)
            folders.commit(folder)

        _raise_everywhere(folder, fault=next(filter(None, (job.exception() for job in jobs)), None))
        for each in gathered({name: entry for job in jobs for name, entry in job.result().items()}):
            entries |= each
        _raise_everywhere(folder, seal_all)

    def _stage(self, found: dict[str, list[_LocatedPiece]]) -> tuple[dict[str, list[_LocatedPiece]], Block | None]:
        """Copy bytes on the device to a block of host memory; without room for it, return everything unchanged and None."""
        on_device = [f.piece for each in found.values() for f in each if f.on_host is None]
        on_device.sort(key=lambda piece: -piece.tensor.nbytes)  # long ones first, at aligned addresses
        sizes = [piece.tensor.nbytes for piece in on_device]
        if not on_device:
            return found, None
        if sum(sizes) > obtainable_bytes(self._arena):
            trim()
        block = self._account.allocate(sum(sizes)) if sum(sizes) <= obtainable_bytes(self._arena) else None
        if block is None:
            logger.warning(
                "%s: training waits until this checkpoint is written, because host memory has no room for a copy of %.2f GB. "
                "Lower activation_offload.max_host_bytes, or set checkpoint.async_save=False",
                self._name,
                sum(sizes) / 1e9,
            )
            return found, None
        staged = {}
        for piece, start in zip(on_device, accumulate(sizes, initial=0), strict=False):
            staged[id(piece)] = list(range_of(block, start, start + piece.tensor.nbytes))
            left = _bytes(piece.tensor)
            for here in staged[id(piece)]:
                here.copy_(left[: here.numel()], non_blocking=True)
                left = left[here.numel() :]

        def filled(each: list[_LocatedPiece]) -> list[_LocatedPiece]:
            return [f._replace(on_host=staged.get(id(f.piece), f.on_host)) for f in each]

        return {part: filled(each) for part, each in found.items()}, block


def _find_all(
    pieces: Mapping[str, list[Piece]],
    offloads: Sequence[TensorOffload],
    device: torch.device,
    frozen: Set[torch.UntypedStorage],
) -> tuple[dict[str, list[_LocatedPiece]], _LiveBytes]:
    """Find each part's pieces, live ones first."""
    place = {storage: (offload, start) for offload in offloads for storage, start in offload.starts().items()}
    live = _LiveBytes()

    def located(piece: Piece) -> _LocatedPiece:
        tensor, storage = piece.tensor, piece.tensor.untyped_storage()
        if storage in frozen:
            return _LocatedPiece(piece, [_bytes(tensor)])
        if storage in place:
            assert tensor.is_contiguous(), f"{piece.name}: an offloaded shard is contiguous"
            offload, start = place[storage]
            on_host = offload.host_bytes(start + tensor.storage_offset() * tensor.itemsize, tensor.nbytes)
        elif tensor.device.type == "cpu" != device.type:
            on_host = [_bytes(tensor)]
        else:
            return _LocatedPiece(piece, None)
        live.pieces += 1
        return _LocatedPiece(piece, on_host, live)

    found = {part: sorted(map(located, each), key=lambda f: f.live is None) for part, each in pieces.items()}
    return found, live


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _write(partial: Path, parts: Mapping[str, Iterable[_LocatedPiece]]) -> Entries:
    entries = {}
    for part, each in parts.items():
        sources = [found.source() for found in each]
        if sources:
            name = f"{part}/{shard_name(dist.get_rank(), dist.get_world_size())}"
            with storing(partial / name):
                entries[name] = write_safetensors(partial / name, sources)
    return entries


def _make_folders(folder: Path, parts: Sequence[str], needed_bytes: int) -> None:
    partial = folders.begin(folder)
    free_bytes = shutil.disk_usage(partial).free
    if needed_bytes > free_bytes:
        raise StorageError(
            f"{folder}: this checkpoint needs {_size(needed_bytes)}, {_size(free_bytes)} are free; free some space, "
            "keep fewer (trainer.max_actor_ckpt_to_keep) or set trainer.default_local_dir, then resume the run"
        )
    for part in parts:
        (partial / part).mkdir()


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def _raise_everywhere(
    folder: Path, of_rank_0: Callable[[], None] | None = None, fault: BaseException | None = None
) -> None:
    """Let rank 0 do something. If that, or something before, failed anywhere, raise it everywhere and remove what was written."""
    if dist.get_rank() == 0 and fault is None and of_rank_0 is not None:
        try:
            with storing(folder):
                of_rank_0()
        except Exception as error:
            fault = error
    faults = [text for text in gathered(fault and str(fault)) if text is not None]
    if not faults:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(folders.partial_of(folder), ignore_errors=True)
    if fault is not None and not isinstance(fault, ExplainedError):
        raise fault
    raise StorageError(faults[0]) from None
