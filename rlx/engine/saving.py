"""Save a role's tensors while training goes on: a thread writes bytes that nobody changes.

Note [who waits for a save]
`begin` copies device memory to staging in the arena, and waits for these copies. Bytes that are in host memory already are written
from where they are: offloaded parameters and states from their block, and tensors of FSDP's own CPU offload. These are the *live*
bytes. They are written first, and the optimizer's next step waits until they are. Nothing else waits. If the host has no room for
staging, `begin` writes before it returns, one tensor at a time.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.checkpoint import folders
from rlx.checkpoint.manifest import FileEntry, seal
from rlx.checkpoint.tensors import Piece, Source, pieces_of, shard_name, write_safetensors
from rlx.engine.residency import TensorOffload, obtainable_bytes, range_of
from rlx.errors import ExplainedError, StorageError, storing
from rlx.offload import Block, HostArena, trim

NOTICEABLE_S = 1.0
Entries = dict[str, FileEntry]
Parts = Mapping[str, Mapping[str, Tensor]]
logger = logging.getLogger(__name__)


class _Save(NamedTuple):
    """A save on its way: its folder, the job that writes parts with live bytes, all jobs, and how to start another one."""

    folder: Path
    live: Future[Entries]
    jobs: list[Future[Entries]]
    submit: Callable[..., Future[Entries]]


class _Found(NamedTuple):
    """A piece and where its bytes are: in host memory as these parts, or on the device."""

    piece: Piece
    on_host: list[Tensor] | None
    is_live: bool = False

    def source(self) -> Source:
        """Return the source to write from; bytes on the device are copied when they are read."""
        if (parts := self.on_host) is not None:
            return Source(self.piece, lambda: parts)
        # A copy on the CPU too, because a tensor that numpy has seen cannot be resized, and so not be offloaded, any more.
        return Source(self.piece, lambda: [_bytes(self.piece.tensor).to("cpu", copy=True)])


class Saves:
    """Writes the sharded state of one role, one save at a time. All processes call `begin` and `finish` together.

    Args:
        arena: host memory for staging.
        name: of the role, for accounts and messages.
        device: of the state.
    """

    def __init__(self, arena: HostArena, name: str, device: torch.device):
        self._arena, self._name, self._device = arena, name, device
        self._account = arena.account(name=f"{name}_checkpoint")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-checkpoint")
        self._save: _Save | None = None

    def begin(self, folder: Path, parts: Parts, offloads: Sequence[TensorOffload], in_background: bool) -> Path:
        """Start to write a role's folder, and return the folder to write other files into before `finish`.

        Args:
            folder: appears at the end of `finish`.
            parts: state by the name of its folder; the storages of offloaded tensors may be empty.
            offloads: hold those tensors.
            in_background: return as soon as no byte on the device is needed any more.

        Raises:
            StorageError: the disk has no room.
        """
        assert self._save is None, "the save before has not been finished"
        partial = folders.partial_of(folder)
        pieces = {part: pieces_of(state) for part, state in parts.items()}
        needed_bytes = sum(_gather(sum(piece.tensor.nbytes for each in pieces.values() for piece in each)))
        _together(folder, lambda: _make_folders(folder, [*parts], needed_bytes))
        where = {storage: (each, start) for each in offloads for storage, start in each.starts().items()}
        found = {part: [_find(piece, where, self._device) for piece in each] for part, each in pieces.items()}
        block = None
        if in_background:
            found, block = self._stage(found)
        if self._device.type != "cpu":  # copies to host memory, of these and of an offload before, may still run
            torch.accelerator.current_stream(self._device).synchronize()
        in_background = in_background and all(f.on_host is not None for each in found.values() for f in each)
        submit: Callable[..., Future[Entries]] = self._thread.submit if in_background else _at_once
        live = {part: each for part, each in found.items() if any(f.is_live for f in each)}
        write_live = submit(_write, partial, live)
        for offload in offloads:
            if offload.is_offloaded:
                offload.lend(write_live)
        write_rest = submit(_write, partial, {part: each for part, each in found.items() if part not in live})
        if block is not None:
            write_rest.add_done_callback(lambda _: self._account.free(block))
        self._save = _Save(folder, write_live, [write_live, write_rest], submit)
        return partial

    def beside(self, write: Callable[[], Entries]) -> None:
        """Let this process write other files of the save too, in the background if that is; `finish` raises its errors."""
        assert self._save is not None
        self._save.jobs.append(self._save.submit(write))

    @property
    def is_written(self) -> bool:
        """Whether `finish` would not wait for this process's disk."""
        return self._save is None or all(job.done() for job in self._save.jobs)

    def before_step(self) -> None:
        """Wait until no live byte has to be written any more, because the optimizer will change them."""
        if self._save is None or self._save.live.done():
            return
        began = time.monotonic()
        wait([self._save.live])
        if (seconds := time.monotonic() - began) > NOTICEABLE_S:
            text = "%s: the optimizer's step waited %.1f s until its state in host memory was in the checkpoint"
            logger.info(text, self._name, seconds)

    def finish(self) -> None:
        """Wait for the thread, write the manifest and let the folder appear; do nothing if there is no save.

        Raises:
            CheckpointError, StorageError: the write failed on a process; what was written is removed.
        """
        if self._save is None:
            return
        folder, jobs = self._save.folder, self._save.jobs
        self._save = None
        wait(jobs)
        entries: Entries = {}

        def seal_all() -> None:
            seal(folders.partial_of(folder), entries)
            folders.commit(folder)

        _together(folder, fault=next(filter(None, (job.exception() for job in jobs)), None))
        for each in _gather({name: entry for job in jobs for name, entry in job.result().items()}):
            entries |= each
        _together(folder, seal_all)

    def _stage(self, found: dict[str, list[_Found]]) -> tuple[dict[str, list[_Found]], Block | None]:
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
        filled = {
            part: [f._replace(on_host=staged.get(id(f.piece), f.on_host)) for f in each] for part, each in found.items()
        }
        return filled, block


def _find(
    piece: Piece, where: Mapping[torch.UntypedStorage, tuple[TensorOffload, int]], device: torch.device
) -> _Found:
    tensor = piece.tensor
    if (place := where.get(tensor.untyped_storage())) is not None:
        offload, start = place
        assert tensor.is_contiguous(), f"{piece.name}: an offloaded shard is contiguous"
        first = start + tensor.storage_offset() * tensor.itemsize
        return _Found(piece, offload.host_bytes(first, tensor.nbytes), is_live=True)
    if tensor.device.type == "cpu" != device.type:
        return _Found(piece, [_bytes(tensor)], is_live=True)
    return _Found(piece, None)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _write(partial: Path, parts: Mapping[str, Iterable[_Found]]) -> Entries:
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


def _at_once(work: Callable[..., Entries], *arguments: Any) -> Future[Entries]:
    """Do work now, and return its result as a future."""
    done: Future[Entries] = Future()
    try:
        done.set_result(work(*arguments))
    except Exception as error:
        done.set_exception(error)
    return done


def _together(folder: Path, of_rank_0: Callable[[], None] | None = None, fault: BaseException | None = None) -> None:
    """Let rank 0 do something. If that or something before failed anywhere, raise it everywhere and remove what was written.

    Args:
        folder: that is written.
        of_rank_0: what rank 0 does.
        fault: of this process, before.
    """
    if dist.get_rank() == 0 and fault is None and of_rank_0 is not None:
        try:
            with storing(folder):
                of_rank_0()
        except Exception as error:
            fault = error
    faults = [text for text in _gather(fault and str(fault)) if text is not None]
    if not faults:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(folders.partial_of(folder), ignore_errors=True)
    if fault is not None and not isinstance(fault, ExplainedError):
        raise fault
    raise StorageError(faults[0]) from None


def _gather(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
