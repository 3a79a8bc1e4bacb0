"""Offload tensors to host memory while another role uses the device.

The memory belongs to the offloading engine's arena (`rlx.offload.host_arena`). Activations do not need it between two updates,
so parameters and optimizer states use the same bytes.

Note [when bytes may be touched]
`offload` queues its copies on the current stream, behind the compute queued there, and waits once, for the last copy. It then
frees device memory. `fetch` allocates all device memory, queues its copies on the current stream and waits for
nothing: the stream's next kernels see the tensors filled. The host's block becomes free after the event of the last copy. FSDP's
own streams wait for the current one before they read a parameter.

Note [a checkpoint reads the block]
A save in the background writes offloaded bytes from their block (`rlx/engine/saving.py`). `keep_until` keeps the block allocated
until they are read, even if `fetch` gives its bytes back to the device before. The optimizer's step, which changes them, waits.

Note [host memory between updates]
After an update the arena stays reserved; offloaded parameters and states use a part of it. To return the rest and reserve it again
costs 0.4 s per GiB for pinning (one H200 machine). To keep it while others run short costs more: Ray kills workers once 95 % of the
host is in use. So rlx returns the rest before the rollout, and only if little memory is left (`HostRelief`).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.config.host_memory import HostMemory, host_memory
from rlx.engine.fsdp_units import local
from rlx.errors import ExplainedError
from rlx.offload import Block, HostArena, host_arena, trim

logger = logging.getLogger(__name__)


class HandOverError(ExplainedError, ValueError):
    """Device or host has no room for tensors that should move there. The tensors do not move."""


class OffloadedStorages(NamedTuple):
    """Storages without memory, the number of bytes of each, and the block of host memory that holds them in this order."""

    storages: list[torch.UntypedStorage]
    lengths: list[int]
    block: Block


class TensorOffload:
    """Frees the device memory behind tensors and fills it again, without replacing the tensors.

    Only bytes move. Parameters, their views, FSDP's references and the optimizer's state stay the same objects, so this class
    works with both kinds of FSDP. The tensors must not be used between `offload` and `fetch`. Accounts and messages have `name`.
    """

    def __init__(self, arena: HostArena, name: str) -> None:
        self._offloaded: OffloadedStorages | None = None
        self._kept_until: Future[Any] | None = None
        self._account = arena.account(name=name)

    @property
    def is_offloaded(self) -> bool:
        return self._offloaded is not None

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the bytes of these tensors (for a DTensor, of its shard) to host memory; shared storages move once.

        Memory that torch did not allocate cannot be freed and stays. Raises HandOverError if the host has no room; all tensors are
        unchanged.
        """
        assert self._offloaded is None, f"{self._account.name} are offloaded already"
        found = {s.data_ptr(): s for s in (local(t).untyped_storage() for t in tensors) if s.nbytes() and s.resizable()}
        if not found:
            return
        # Long storages first, so that their copies begin at aligned addresses.
        storages = sorted(found.values(), key=torch.UntypedStorage.nbytes, reverse=True)
        lengths = [storage.nbytes() for storage in storages]
        block = self._room(sum(lengths))
        try:
            for on_device, on_host in _pairs(storages, block):
                on_host.copy_(on_device, non_blocking=True)
            copied = _event(storages[0].device)
            if copied is not None:
                copied.synchronize()
        except BaseException:
            self._account.free(block, after=_event(storages[0].device))
            raise
        self._offloaded = OffloadedStorages(storages, lengths, block)
        for storage in storages:
            storage.resize_(0)

    def fetch(self) -> None:
        """Fetch all bytes and free the host memory. Raises HandOverError if the device has no room; everything stays offloaded."""
        if self._offloaded is None:
            return
        storages, lengths, block = self._offloaded
        try:
            for storage, nbytes in zip(storages, lengths, strict=True):
                storage.resize_(nbytes)
        except RuntimeError as error:
            for storage in storages:
                storage.resize_(0)
            raise HandOverError(
                f"{self._account.name}: no device memory to fetch {block.nbytes / 1e9:.2f} GB from host memory, where they "
                f"stay ({str(error).splitlines()[0]}). Offload the other roles too (param_offload, optimizer_offload), or lower "
                "the sampler's share (rollout.gpu_memory_utilization) or the micro-batches"
            ) from error
        copy_on(None, _pairs(storages, block))
        self._offloaded = None
        self._free(block, _event(storages[0].device))

    def starts(self) -> dict[torch.UntypedStorage, int]:
        """Return the offset of each offloaded storage in host memory [bytes], for `host_bytes`."""
        if self._offloaded is None:
            return {}
        storages, lengths, _ = self._offloaded
        return dict(zip(storages, accumulate(lengths, initial=0), strict=False))

    def host_bytes(self, start: int, nbytes: int) -> list[Tensor]:
        assert self._offloaded is not None
        return list(range_of(self._offloaded.block, start, start + nbytes))

    def keep_until(self, until: Future[Any]) -> None:
        """Keep the block allocated until `until` is done. See Note [a checkpoint reads the block]."""
        self._kept_until = until

    def _free(self, block: Block, after: torch.Event | None) -> None:
        account, until, self._kept_until = self._account, self._kept_until, None
        if until is None:
            account.free(block, after=after)
        else:
            until.add_done_callback(lambda _: account.free(block, after=after))

    def parts(self, tensor: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of a tensor and those of the offloaded bytes from `first` on that belong together, to copy either way."""
        assert self._offloaded is not None
        return _with_block(tensor, self._offloaded.block, first)

    def _room(self, nbytes: int) -> Block:
        arena = self._account.arena
        if nbytes > obtainable_bytes(arena):
            trim()  # also waits for copies that are still running
        # Linux grants more memory than it has and kills the process that then uses it, so check first.
        obtainable = obtainable_bytes(arena)
        block = self._account.allocate(nbytes) if nbytes <= obtainable else None
        if block is None:
            holders = ", ".join(f"{name} {held / 1e9:.2f} GB" for name, held in arena.holders().items() if held)
            raise HandOverError(
                f"{self._account.name}: got {nbytes / 1e9:.2f} GB to offload to host memory, which has {obtainable / 1e9:.2f} GB "
                f"besides the tensors of this process ({holders or 'none'}). They are still on the device. Set the role's "
                "param_offload or optimizer_offload to False, lower activation_offload.max_host_bytes, or give the machine or "
                "container more memory"
            )
        return block

    def __del__(self) -> None:
        if self._offloaded is not None:
            self._free(self._offloaded.block, None)


def obtainable_bytes(arena: HostArena) -> int:
    """Return the bytes that are free in the arena or that it may still take from the system."""
    growth = host_memory().available_bytes
    if arena.max_bytes is not None:
        growth = min(growth, arena.max_bytes - arena.reserved_bytes)
    return arena.reserved_bytes - arena.held_bytes + growth


def _pairs(storages: Iterable[torch.UntypedStorage], block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield equal pieces of the storages and of the block in order, cut where either ends."""
    first = 0
    for storage in storages:
        yield from _with_block(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), block, first)
        first += storage.nbytes()


def _with_block(tensor: Tensor, block: Block, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield equal pieces of a one-dimensional tensor and of a block's bytes from `first` on, in order."""
    left = tensor.view(torch.uint8)
    for on_host in range_of(block, first, first + left.numel()):
        yield left[: on_host.numel()], on_host
        left = left[on_host.numel() :]


def range_of(block: Block, first: int, end: int) -> Iterator[Tensor]:
    """Yield the parts of a block's bytes from `first` to before `end`."""
    start = 0
    for view in block.views:
        stop = start + view.numel()
        if max(first, start) < min(end, stop):
            yield view[max(0, first - start) : end - start]
        start = stop


def copy_on(stream: torch.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.Event | None:
    """Copy the second tensor of each pair to the first, after the current stream's work; return an event after the copies."""
    if stream is not None:
        stream.wait_event(torch.accelerator.current_stream(stream.device).record_event())
    with stream or nullcontext():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()


def _event(device: torch.device) -> torch.Event | None:
    """Return an event after all work queued on the device's current stream; None on CPU, which has no queue."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


class HostRelief:
    """Returns the free part of the arenas to the system if host memory is short."""

    def __init__(self) -> None:
        self._has_told = False

    def relieve(self, memory: HostMemory) -> int:
        """Free unused blocks of the arenas if `memory` is short, and return their bytes."""
        if not memory.is_short:
            return 0
        freed = trim()
        if freed and not self._has_told:
            self._has_told = True
            logger.info(
                "host memory is short (%.1f of %.1f GB available): the %.1f GB reserved for activations go back to the system "
                "before each rollout, and the next update allocates them again, which takes time. "
                "activation_offload.max_host_bytes limits them",
                memory.available_bytes / 1e9,
                memory.total_bytes / 1e9,
                freed / 1e9,
            )
        return freed


def host_use() -> dict[str, int]:
    """Return the host memory that this process keeps for offloaded tensors [bytes].

    Returns:
        Bytes held now, pinned or not, by the name of each holder; and `reserved`, taken from the system for all of them.
    """
    arenas = [host_arena(pinned) for pinned in (False, True)]
    held = sum((Counter(arena.holders()) for arena in arenas), Counter())
    return {"reserved": sum(arena.reserved_bytes for arena in arenas), **+held}
