"""An allocator of byte ranges, for memory and for files, by best fit with coalescing: pure bookkeeping.

A request that fits no single free range is split over several. On responses of varying length it reserves a few percent more than is
allocated, while an allocator with size classes reserves a multiple.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

PAGE_ALIGN_BYTES = 4096  # one page; direct I/O needs offsets, lengths and addresses that are multiples of it
MIN_EXTENT_BYTES = (
    64 << 10
)  # a request is split only over free ranges of this length: every extent costs a copy command
GROWTH_UNIT_BYTES = 2 << 20  # growth is a multiple of this, one huge page
GROWTH_STEP_BYTES = 32 << 20  # growth below 1 GiB reserved; above, 1/32 of the reserved bytes, so that slabs are few


class Extent(NamedTuple):
    """`length` bytes from byte `start` of a slab."""

    slab: int
    start: int
    length: int


def page_aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


def growth_bytes(missing_bytes: int, reserved_bytes: int) -> int:
    """Return how much to reserve when `missing_bytes` are lacking: few slabs, and at most 1/32 too much above 1 GiB."""
    wanted = max(missing_bytes, min(reserved_bytes, GROWTH_STEP_BYTES), reserved_bytes // 32)
    return -(-wanted // GROWTH_UNIT_BYTES) * GROWTH_UNIT_BYTES


class RangeAllocator:
    """Allocates and frees ranges of slabs, which are numbered."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # (length, slab, start), sorted
        self._by_start: dict[tuple[int, int], int] = {}  # (slab, start) -> length
        self._by_end: dict[tuple[int, int], int] = {}  # (slab, end) -> start
        self._slabs: dict[int, int] = {}

    def extend(self, slab: int, nbytes: int) -> None:
        start = self._slabs.get(slab, 0)
        self._slabs[slab] = start + nbytes
        self.free([Extent(slab, start, nbytes)])

    def allocate(self, nbytes: int) -> list[Extent] | None:
        if nbytes > self.usable_bytes(nbytes):
            return None
        extents: list[Extent] = []
        while nbytes > 0:
            best = bisect_left(self._by_size, (nbytes, -1, -1))
            length, slab, start = self._by_size[min(best, len(self._by_size) - 1)]
            self._remove(slab, start, length)
            used = min(length, nbytes)
            if used < length:
                self._insert(slab, start + used, length - used)
            extents.append(Extent(slab, start, used))
            nbytes -= used
        return extents

    def usable_bytes(self, nbytes: int) -> int:
        """Return how many of `nbytes` fit into free ranges, without extents shorter than `MIN_EXTENT_BYTES`."""
        if self._by_size and self._by_size[-1][0] >= nbytes:
            return nbytes
        return sum(length for length, _, _ in self._by_size[bisect_left(self._by_size, (MIN_EXTENT_BYTES, -1, -1)) :])

    def free(self, extents: Sequence[Extent]) -> None:
        for slab, start, length in extents:
            if (before := self._by_end.get((slab, start))) is not None:
                self._remove(slab, before, start - before)
                start, length = before, length + start - before
            if (after := self._by_start.get((slab, start + length))) is not None:
                self._remove(slab, start + length, after)
                length += after
            self._insert(slab, start, length)

    def remove_free_slabs(self) -> list[int]:
        free = [slab for slab, length in self._slabs.items() if self._by_start.get((slab, 0)) == length]
        for slab in free:
            self._remove(slab, 0, self._slabs.pop(slab))
        return free

    @property
    def free_bytes(self) -> int:
        return sum(length for length, _, _ in self._by_size)

    def _insert(self, slab: int, start: int, length: int) -> None:
        insort(self._by_size, (length, slab, start))
        self._by_start[slab, start] = length
        self._by_end[slab, start + length] = start

    def _remove(self, slab: int, start: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, slab, start))]
        del self._by_start[slab, start]
        del self._by_end[slab, start + length]


# Sizes of the host buffers between the device and the disk. Options are checked with them, without torch.
MAX_CHUNK_BYTES = 16 << 20
WRITE_BUFFERS = 16
READER_THREADS = 8  # each has one buffer
MIN_STAGING_BYTES = (WRITE_BUFFERS + READER_THREADS) * PAGE_ALIGN_BYTES


def chunk_bytes(max_staging_bytes: int | None) -> int:
    """Return the size of a staging buffer when all of them together may take so much; 0 if that is too little."""
    if max_staging_bytes is None:
        return MAX_CHUNK_BYTES
    share = max_staging_bytes // (WRITE_BUFFERS + READER_THREADS)
    return min(MAX_CHUNK_BYTES, share - share % PAGE_ALIGN_BYTES)


def staging_bytes(chunk_bytes: int) -> int:
    return chunk_bytes * (WRITE_BUFFERS + READER_THREADS)
