"""Host memory for what has left the device: one arena per process and kind of memory, shared by all who offload.

`RangeAllocator` decides where bytes lie and touches no memory; `HostArena` owns the memory; an `Account` is one user's
share of it, with a cap and its own accounting.

Note [who may free a host buffer]
A block belongs to the object that took it. A copy may still read from it or write to it when its owner dies, which is
any moment at which Python collects garbage, on any thread. So `Account.give` takes no lock and waits for nothing: it
appends the block and the event after which no copy touches it to a queue (appending to a deque is atomic). Whoever next
takes memory or asks for figures returns to the free ranges those blocks whose event has passed; one who finds no room
waits for the events, oldest first, before any memory is asked of the system. That is why a steady step takes none.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

logger = logging.getLogger("rlx.offload")

ALIGN_BYTES = 512
# A tensor is laid over several free ranges only if each is at least this long: every piece costs one copy command.
MIN_PIECE_BYTES = 64 << 10
MIN_GROWTH_BYTES = 1 << 20
MAX_SLAB_BYTES = 1 << 30


class Event(Protocol):
    """What an arena needs of an event on a device's stream."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> None:
        """Wait until it has passed."""


class Piece(NamedTuple):
    """`length` bytes from byte `start` of a slab."""

    slab: int
    start: int
    length: int


class RangeAllocator:
    """Best fit with coalescing over slabs; what fits no single range is laid over several. Holds no memory."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # (length, slab, start), sorted
        self._by_start: dict[tuple[int, int], int] = {}  # (slab, start) -> length
        self._by_end: dict[tuple[int, int], int] = {}  # (slab, end) -> start
        self._slabs: dict[int, int] = {}

    def add_slab(self, slab: int, length: int) -> None:
        """Add a free slab of `length` bytes."""
        self._slabs[slab] = length
        self._insert(slab, 0, length)

    def take(self, nbytes: int) -> list[Piece] | None:
        """Pieces of `nbytes` in all (a multiple of `ALIGN_BYTES`), or None when they do not fit."""
        if nbytes > self.usable_bytes(nbytes):
            return None
        pieces: list[Piece] = []
        while nbytes > 0:
            best = bisect_left(self._by_size, (nbytes, -1, -1))
            length, slab, start = self._by_size[min(best, len(self._by_size) - 1)]
            self._remove(slab, start, length)
            used = min(length, nbytes)
            if used < length:
                self._insert(slab, start + used, length - used)
            pieces.append(Piece(slab, start, used))
            nbytes -= used
        return pieces

    def usable_bytes(self, nbytes: int) -> int:
        """How many of `nbytes` the free ranges can hold without pieces that are too short."""
        if self._by_size and self._by_size[-1][0] >= nbytes:
            return nbytes
        return sum(length for length, _, _ in self._by_size[bisect_left(self._by_size, (MIN_PIECE_BYTES, -1, -1)) :])

    def give(self, pieces: Sequence[Piece]) -> None:
        """Return pieces, joined with the free ranges beside them."""
        for slab, start, length in pieces:
            before = self._by_end.get((slab, start))
            if before is not None:
                self._remove(slab, before, start - before)
                start, length = before, length + start - before
            after = self._by_start.get((slab, start + length))
            if after is not None:
                self._remove(slab, start + length, after)
                length += after
            self._insert(slab, start, length)

    def remove_free_slabs(self) -> list[int]:
        """Forget the slabs of which nothing is in use, and name them."""
        free = [slab for slab, length in self._slabs.items() if self._by_start.get((slab, 0)) == length]
        for slab in free:
            self._remove(slab, 0, self._slabs.pop(slab))
        return free

    @property
    def free_bytes(self) -> int:
        """Sum of the free ranges [bytes]."""
        return sum(length for length, _, _ in self._by_size)

    def _insert(self, slab: int, start: int, length: int) -> None:
        insort(self._by_size, (length, slab, start))
        self._by_start[slab, start] = length
        self._by_end[slab, start + length] = start

    def _remove(self, slab: int, start: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, slab, start))]
        del self._by_start[slab, start]
        del self._by_end[slab, start + length]


class Block:
    """Host bytes taken from an arena, in one or several pieces."""

    __slots__ = ("nbytes", "pieces", "views")

    def __init__(self, nbytes: int, pieces: list[Piece], views: list[Tensor]) -> None:
        self.nbytes = nbytes
        self.pieces = pieces
        self.views = views  # uint8 tensors whose lengths add up to nbytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pieces, alignment included."""
        return sum(piece.length for piece in self.pieces)


class Account:
    """One user's share of an arena.

    Args:
        arena: where the memory comes from.
        max_bytes: hard cap of what the account holds [bytes]; None: no cap.
    """

    def __init__(self, arena: HostArena, max_bytes: int | None) -> None:
        self.arena = arena
        self.max_bytes = max_bytes
        self._held_bytes = 0
        self._reserved_bytes = 0

    def take(self, nbytes: int) -> Block | None:
        """A block of `nbytes`, or None when the cap is reached or the system has no memory left."""
        return self.arena.take(self, nbytes)

    def give(self, block: Block, after: Event | None = None) -> None:
        """Return a block; `after`: the last event before which a copy may touch it. Never blocks, on any thread."""
        self.arena.returned.append((self, block, after))

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that are held now."""
        self.arena.settle()
        return self._held_bytes


class HostArena:
    """Host memory that grows to the largest amount ever held, and no further.

    Args:
        pinned: page-locked memory; where the system refuses it, pageable memory with one warning.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.returned: deque[tuple[Account, Block, Event | None]] = deque()
        self.allocations = 0
        self._cooling: deque[tuple[Block, Event]] = deque()
        self._ranges = RangeAllocator()
        self._slabs: dict[int, Tensor] = {}
        self._accounts: weakref.WeakSet[Account] = weakref.WeakSet()
        self._reserved_bytes = 0
        self._lock = threading.Lock()

    def account(self, max_bytes: int | None = None) -> Account:
        """A new share of the arena, capped at `max_bytes`."""
        account = Account(self, max_bytes)
        with self._lock:
            self._accounts.add(account)
        return account

    @property
    def reserved_bytes(self) -> int:
        """Memory taken from the system and not given back [bytes]."""
        return self._reserved_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that are held, alignment included, and of those that a copy still works on."""
        with self._lock:
            self._settle()
            return self._reserved_bytes - self._ranges.free_bytes

    def take(self, account: Account, nbytes: int) -> Block | None:
        """A block of `nbytes` for an account, or None when its cap is reached or the system has no memory left."""
        needed = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            self._settle()
            if account.max_bytes is not None and account._reserved_bytes + needed > account.max_bytes:
                return None
            pieces = self._ranges.take(needed)
            while pieces is None and self._cooling:
                block, event = self._cooling.popleft()
                event.synchronize()
                self._ranges.give(block.pieces)
                pieces = self._ranges.take(needed)
            if pieces is None:
                self._grow(needed)
                pieces = self._ranges.take(needed)
            if pieces is None:
                return None
            account._held_bytes += nbytes
            account._reserved_bytes += needed
            return Block(nbytes, pieces, self._views(pieces, nbytes))

    def settle(self) -> None:
        """Put what was given back in the books."""
        with self._lock:
            self._settle()

    def trim(self) -> int:
        """Give slabs of which nothing is in use back to the system; returns how many bytes that were."""
        with self._lock:
            self._settle()
            while self._cooling:
                block, event = self._cooling.popleft()
                event.synchronize()
                self._ranges.give(block.pieces)
            freed = sum(self._slabs.pop(slab).nbytes for slab in self._ranges.remove_free_slabs())
            self._reserved_bytes -= freed
        if self.pinned and freed:
            _empty_pinned_cache()
        return freed

    def _settle(self) -> None:
        while self.returned:
            account, block, after = self.returned.popleft()
            account._held_bytes -= block.nbytes
            account._reserved_bytes -= block.reserved_bytes
            if after is None:
                self._ranges.give(block.pieces)
            else:
                self._cooling.append((block, after))
        while self._cooling and self._cooling[0][1].query():
            self._ranges.give(self._cooling.popleft()[0].pieces)

    def _views(self, pieces: list[Piece], nbytes: int) -> list[Tensor]:
        views, left = [], nbytes
        for piece in pieces:
            length = min(piece.length, left)
            views.append(self._slabs[piece.slab][piece.start : piece.start + length])
            left -= length
        return views

    def _grow(self, needed: int) -> None:
        """Take from the system what is missing for `needed` bytes, in slabs whose sizes are powers of two.

        Powers of two because torch's allocator of pinned memory rounds every request up to one.
        """
        missing = max(needed - self._ranges.usable_bytes(needed), self._reserved_bytes // 64)
        missing = -(-missing // MIN_GROWTH_BYTES) * MIN_GROWTH_BYTES
        caps = [account.max_bytes for account in self._accounts]
        if caps and None not in caps:
            missing = min(missing, sum(cap for cap in caps if cap is not None) - self._reserved_bytes)
        while missing >= ALIGN_BYTES:
            size = min(1 << (missing.bit_length() - 1), MAX_SLAB_BYTES)
            slab = self._new_slab(size)
            if slab is None:
                return
            self._slabs[self.allocations] = slab
            self._ranges.add_slab(self.allocations, size)
            self.allocations += 1
            self._reserved_bytes += size
            missing -= size

    def _new_slab(self, size: int) -> Tensor | None:
        if self.pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self.pinned = False
                logger.warning(
                    "activation offloading: the system refused %d more bytes of page-locked memory beside %d (%s); "
                    "pageable memory is used from here on, whose copies do not overlap compute. "
                    "Raise the limit of locked memory, or lower max_host_bytes",
                    size,
                    self._reserved_bytes,
                    str(error).splitlines()[0],
                )
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        except (RuntimeError, MemoryError) as error:
            logger.warning("activation offloading: no host memory left for %d more bytes (%s)", size, error)
            return None


_ARENAS: dict[bool, HostArena] = {}
_ARENAS_LOCK = threading.Lock()


def host_arena(pinned: bool) -> HostArena:
    """The arena of this process for page-locked or for pageable memory."""
    with _ARENAS_LOCK:
        return _ARENAS.setdefault(pinned, HostArena(pinned))


def _empty_pinned_cache() -> None:
    # Public only since torch 2.12; before that the pinned cache keeps what a trim gives back until the process ends.
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
    if empty_host_cache is not None:
        empty_host_cache()
