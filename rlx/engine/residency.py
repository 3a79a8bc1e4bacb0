"""Letting tensors wait in host memory while another role works on the device.

The memory is the offloading engine's (`rlx.offload.host_arena`): parameters and optimizer states take what activations
leave free between two updates, and the other way round.

Note [who may touch what, and when]
`park` queues its copies on the current stream, behind all that compute has queued there, and waits once, after the last
of them; only then is device memory given up. `unpark` takes device memory for all, queues its copies on the current
stream, whose next kernels find the tensors filled, and waits for nothing: the host's block is free again once the event
behind the last copy has passed. FSDP's own streams wait for the current one before they read a parameter.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.config.host_memory import host_memory
from rlx.engine.optimizer import local
from rlx.errors import ExplainedError
from rlx.offload import Block, HostArena, trim


class HandOverError(ExplainedError, ValueError):
    """There is no room for what is to change between device and host; it stays where it is, whole."""


class Parked(NamedTuple):
    """Storages without memory, the bytes each had, and the block that they lie in, in this order."""

    storages: list[torch.UntypedStorage]
    lengths: list[int]
    block: Block


class Parking:
    """Takes the memory behind tensors away and gives it back, without the tensors being replaced.

    Only the bytes move: parameters, their views, FSDP's references and the optimizer's state all stay the objects they
    are, so this needs to know nothing of either kind of FSDP. Between `park` and `unpark` nobody may touch them.

    Args:
        arena: where the bytes wait.
        name: of what is parked here, for accounts and messages.
    """

    def __init__(self, arena: HostArena, name: str) -> None:
        self._parked: Parked | None = None
        self._copied: torch.Event | None = None  # behind the last copy between `lend` and `let_go`
        self._account = arena.account(name=name)

    @property
    def occupied(self) -> bool:
        """Whether something is parked."""
        return self._parked is not None

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Moves the bytes behind these tensors (of a DTensor its shard) to the host; a storage they share moves once.

        Args:
            tensors: on one device. Memory that torch did not allocate itself cannot be given back, and stays.

        Raises:
            HandOverError: the host has no room; all tensors are as they were.
        """
        assert self._parked is None, f"{self._account.name} are parked already"
        found = {s.data_ptr(): s for s in (local(t).untyped_storage() for t in tensors) if s.nbytes() and s.resizable()}
        if not found:
            return
        # Long ones first: their copies begin at round addresses.
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
        self._parked = Parked(storages, lengths, block)
        for storage in storages:
            storage.resize_(0)

    def unpark(self) -> None:
        """Brings everything back.

        Raises:
            HandOverError: the device has no room; everything stays parked.
        """
        if self._parked is None:
            return
        self.lend(None)
        storages, _, block = self._parked
        self._parked = None
        self._account.free(block, after=_event(storages[0].device))

    def lend(self, stream: torch.Stream | None) -> None:
        """Begins to bring everything back on a stream; the host's memory waits for `take_back`.

        Args:
            stream: None for the current one.

        Raises:
            HandOverError: the device has no room; everything stays parked.
        """
        assert self._parked is not None
        storages, lengths, block = self._parked
        try:
            for storage, nbytes in zip(storages, lengths, strict=True):
                storage.resize_(nbytes)
        except RuntimeError as error:
            for storage in storages:
                storage.resize_(0)
            raise HandOverError(
                f"{self._account.name}: no device memory for {block.nbytes / 1e9:.2f} GB that waited in host memory, where "
                f"they stay ({str(error).splitlines()[0]}). Let the other roles wait there too (param_offload, "
                "optimizer_offload), or lower the sampler's share (rollout.gpu_memory_utilization) or the micro-batches"
            ) from error
        self._copied = _copy_on(stream, ((here, there) for here, there in _pairs(storages, block)))

    def take_back(self, stream: torch.Stream | None) -> None:
        """Begins to send what was lent to the host again, on a stream; `let_go` ends it."""
        assert self._parked is not None
        self._copied = _copy_on(
            stream, ((there, here) for here, there in _pairs(self._parked.storages, self._parked.block))
        )

    def await_copy(self) -> None:
        """Makes the current stream wait for the last copy that was begun."""
        if self._copied is not None:
            torch.accelerator.current_stream(self._parked_device()).wait_event(self._copied)
            self._copied = None

    def let_go(self) -> None:
        """Gives the device memory up of what was taken back, behind its copy; nothing where nothing was."""
        if self._parked is not None:
            self.await_copy()
            for storage in self._parked.storages:
                storage.resize_(0)

    def _parked_device(self) -> torch.device:
        assert self._parked is not None
        return self._parked.storages[0].device

    def _room(self, nbytes: int) -> Block:
        arena = self._account.arena
        if nbytes > _obtainable_bytes(arena):
            trim()  # waits for copies that are on their way, too
        # Asked for first: Linux promises more memory than there is, and ends who then uses it.
        obtainable = _obtainable_bytes(arena)
        block = self._account.allocate(nbytes) if nbytes <= obtainable else None
        if block is None:
            holders = ", ".join(f"{name} {held / 1e9:.2f} GB" for name, held in arena.holders().items() if held)
            raise HandOverError(
                f"{self._account.name}: {nbytes / 1e9:.2f} GB are to wait in host memory, where {obtainable / 1e9:.2f} GB can be "
                f"had beside what this process holds there ({holders or 'nothing'}). They are still on the device. Set the "
                "role's param_offload or optimizer_offload to False, lower activation_offload.max_host_bytes, or give the "
                "machine or container more memory"
            )
        return block

    def __del__(self) -> None:
        if self._parked is not None:
            self._account.free(self._parked.block)


def _obtainable_bytes(arena: HostArena) -> int:
    """What can be taken: free in the arena, or left for it to take from the system."""
    growth = host_memory().available_bytes
    if arena.max_bytes is not None:
        growth = min(growth, arena.max_bytes - arena.reserved_bytes)
    return arena.reserved_bytes - arena.held_bytes + growth


def _pairs(storages: Iterable[torch.UntypedStorage], block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of the storages and those of the block side by side, cut where either has an end."""
    views = iter(block.views)
    on_host = next(views)
    for storage in storages:
        left = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        while left.numel():
            if not on_host.numel():
                on_host = next(views)
            length = min(left.numel(), on_host.numel())
            yield left[:length], on_host[:length]
            left, on_host = left[length:], on_host[length:]


def _copy_on(stream: torch.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.Event | None:
    """Copies second to first of each pair, behind what the current stream has queued; returns an event behind the copies."""
    if stream is not None:
        stream.wait_event(torch.accelerator.current_stream(stream.device).record_event())
    with stream or nullcontext():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()


def _event(device: torch.device) -> torch.Event | None:
    """An event behind all that is queued on the device's current stream; None on CPU, where nothing is queued."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
