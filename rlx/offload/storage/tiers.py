"""The two tiers that hold offloaded bytes: host memory and disk.

Note [reads and writes cannot wait for each other]
Bytes go to and from the disk in chunks, through page-locked staging buffers.
*Write.* Forward allocates a staging buffer, queues the copy into it and hands it to a writer thread. The thread waits for the
copy, writes the chunk and frees the buffer. Forward waits while all staging buffers are in use.
*Read.* A reader thread waits until the chunks of its allocation are written. It then allocates a staging buffer, reads the
chunk and queues the copy to the device.
These waits make no circle. Writers wait for the device only. Readers wait for writers, and have threads and staging buffers of
their own, at most one buffer a thread. Forward and backward wait for writers and readers. No writer or reader takes a lock that
is held during a wait. On the device a copy waits only for work that was queued before it.

Note [who may free an extent]
The owner of a disk allocation may die at any moment, while writes and reads of the allocation are queued or running. A queued
task has a weak reference to the allocation and finds it gone. A running task has a strong one. So the last holder frees the
extents in `DiskAllocation.__del__`. That takes no lock: it appends them to a queue, which is emptied before the file hands out
more. `held_bytes` drops earlier, when the owner calls `free`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.offload.storage.arena import Account, Block, HostArena, as_bytes, host_arena
from rlx.offload.storage.copy_streams import CopyStreams, FetchBuffer, PendingTasks
from rlx.offload.storage.pages import Pages
from rlx.offload.storage.ranges import WRITE_BUFFERS, Extent, staging_bytes
from rlx.offload.storage.spill_file import DiskError, ExtentFile, extent_files

logger = logging.getLogger("rlx.offload")


class HostAllocation:
    """A block of host memory."""

    __slots__ = ("_account", "_block", "_last_copy")

    def __init__(self, account: Account, block: Block) -> None:
        self._account = account
        self._block = block
        self._last_copy: torch.Event | None = None

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None:
        """Begin to copy a contiguous tensor here; return the event after which its memory is not read any more."""
        self._last_copy = copy_streams.copy_to_host(source, self._block)
        return self._last_copy

    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None:
        """Allocate the fetch buffer and begin to copy the bytes into it, once they are written."""
        self._last_copy = copy_streams.copy_to_device(self._block, fetch_buffer, after=self._last_copy)

    def free(self) -> None:
        """Give the room back. Callable on any thread; never blocks."""
        self._account.free(self._block, self._last_copy)


class HostTier:
    """Host memory, of one account of an arena."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def allocate(self, nbytes: int) -> HostAllocation | None:
        """Return room for `nbytes`, or None if the tier is full."""
        block = self._account.allocate(nbytes)
        return None if block is None else HostAllocation(self._account, block)

    @property
    def held_bytes(self) -> int:
        """Bytes that are allocated now."""
        return self._account.held_bytes


class StagingBuffers:
    """A fixed number of host buffers between the device and the disk, of `chunk_bytes` each and `nbytes` together."""

    def __init__(self, arena: HostArena, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.nbytes = staging_bytes(chunk_bytes)
        self._account = arena.account(self.nbytes, "disk_buffers")
        self._free_to_write = threading.BoundedSemaphore(WRITE_BUFFERS)
        self._has_warned = False

    def allocate_to_write(self, nbytes: int, copy_streams: CopyStreams) -> Block:
        """Return a buffer for a writer thread; wait for one if all are in use."""
        if not self._free_to_write.acquire(blocking=False):
            with copy_streams.stalling(copy_streams.compute_stream()):
                self._free_to_write.acquire()
        try:
            return self.allocate(nbytes)
        except BaseException:
            self._free_to_write.release()
            raise

    def free_written(self, block: Block) -> None:
        """Free a buffer that `allocate_to_write` returned."""
        self.free(block)
        self._free_to_write.release()

    def allocate(self, nbytes: int) -> Block:
        """Return a buffer for a reader thread."""
        block = self._account.allocate(nbytes)
        if block is None:
            # Backward needs the bytes on disk. The account has room for all buffers, so the arena's own limit is reached.
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "activation offloading: the host arena is full and has no page-locked memory left for copies to and from "
                    f"the disk; up to {self.nbytes} bytes of pageable memory are used in addition. Raise the arena's limit"
                )
            block = Block(nbytes, [], [Pages(nbytes, is_locked=False).bytes])
        return block

    def free(self, block: Block, after: torch.Event | None = None) -> None:
        """Free a reader's buffer; `after` is the event that ends the copy from it."""
        if block.extents:
            self._account.free(block, after)
        elif after is not None:
            after.synchronize()


class Chunk(NamedTuple):
    """The part of a disk allocation that one staging buffer holds."""

    offset: int  # in the file
    first_byte: int  # of the allocation's bytes
    nbytes: int  # a multiple of PAGE_ALIGN_BYTES; the last chunk ends with padding


class DiskAllocation:
    """Extents of a file, held by their owner and by running tasks only (Note [who may free an extent])."""

    def __init__(self, tier: DiskTier, nbytes: int, extents: list[Extent]) -> None:
        self.tier = tier
        self.written = PendingTasks()
        self._nbytes = nbytes
        self._extents = extents

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None:
        """See `HostAllocation.write`. Waits for a staging buffer if the disk is slower than forward."""
        here, staging, left, source = weakref.ref(self), self.tier.staging, None, as_bytes(source)
        for chunk in self._chunks():
            block = staging.allocate_to_write(chunk.nbytes, copy_streams)
            try:
                left = copy_streams.copy_to_host(source[chunk.first_byte : chunk.first_byte + chunk.nbytes], block)
            except BaseException:
                staging.free_written(block)
                raise
            self.written.expect()
            task = partial(_write_chunk, here, self.tier, self.written, chunk, copy_streams, block, left)
            self.tier.file.submit(task, writes=True)
        return left

    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None:
        """See `HostAllocation.read`."""
        fetch_buffer.allocate()
        here, there, issued = weakref.ref(self), weakref.ref(fetch_buffer), PendingTasks()
        fetch_buffer.issued = issued
        for chunk in self._chunks():
            issued.expect()
            task = partial(_read_chunk, here, self.tier, self.written, chunk, copy_streams, there, issued)
            self.tier.file.submit(task, writes=False)

    def free(self) -> None:
        """See `HostAllocation.free`."""
        self.tier.freed.append(self._nbytes)

    def __del__(self) -> None:
        self.tier.file.freed.append(self._extents)

    def _chunks(self) -> Iterator[Chunk]:
        first_byte = 0
        for extent in self._extents:
            for start in range(0, extent.length, self.tier.staging.chunk_bytes):
                nbytes = min(self.tier.staging.chunk_bytes, extent.length - start)
                yield Chunk(extent.start + start, first_byte, nbytes)
                first_byte += nbytes


def _write_chunk(
    here: weakref.ref[DiskAllocation],
    tier: DiskTier,
    written: PendingTasks,
    chunk: Chunk,
    copy_streams: CopyStreams,
    block: Block,
    copied: torch.Event | None,
) -> None:
    """Write one chunk of an allocation, on a writer thread."""
    failure: BaseException | None = None
    try:
        if copied is not None:
            with copy_streams.device_is_current():
                copied.synchronize()
        allocation = here()
        if allocation is not None:
            with tier.working("write", chunk):
                tier.file.write(block.views, chunk.offset)
    except BaseException as error:
        failure = _without_frames(error)
    allocation = None  # dropped before waiters go on, so that its extents are free by then
    tier.staging.free_written(block)
    written.done(failure)


def _read_chunk(
    here: weakref.ref[DiskAllocation],
    tier: DiskTier,
    written: PendingTasks,
    chunk: Chunk,
    copy_streams: CopyStreams,
    there: weakref.ref[FetchBuffer],
    issued: PendingTasks,
) -> None:
    """Read one chunk of an allocation and queue its copy to the device, on a reader thread."""
    failure: BaseException | None = None
    copied: torch.Event | None = None
    try:
        written.wait()
        with copy_streams.device_is_current():
            copied = _fetch_chunk(here(), tier, chunk, copy_streams, there())
    except BaseException as error:
        failure = _without_frames(error)
    issued.done(failure)
    if copied is not None:
        with copy_streams.device_is_current():
            copied.synchronize()  # else this thread would fill all staging buffers while the device is busy


def _fetch_chunk(
    allocation: DiskAllocation | None,
    tier: DiskTier,
    chunk: Chunk,
    copy_streams: CopyStreams,
    fetch_buffer: FetchBuffer | None,
) -> torch.Event | None:
    if allocation is None or fetch_buffer is None:
        return None
    block, copied = tier.staging.allocate(chunk.nbytes), None
    try:
        with tier.working("read", chunk):
            tier.file.read(block.views, chunk.offset)
        target = as_bytes(fetch_buffer.tensor)[chunk.first_byte : chunk.first_byte + block.nbytes]
        copied = copy_streams.copy_into(target, block, fetch_buffer)
    finally:
        tier.staging.free(block, copied)
    return copied


def _without_frames(error: BaseException) -> BaseException:
    # The error is kept until somebody waits. The frames of its traceback would keep the allocation and the buffer alive.
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class DiskTier:
    """Space in a file. A `warning` is logged when it is first used."""

    def __init__(self, file: ExtentFile, staging: StagingBuffers, warning: str | None) -> None:
        self.file = file
        self.staging = staging
        self.freed: deque[int] = deque()
        self.moved_bytes = 0
        self.busy_ms = 0.0  # time in which at least one thread was writing or reading
        self._held_bytes = 0
        self._warning = warning
        self._busy_threads = 0
        self._busy_since = 0.0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> DiskAllocation:
        """Return room for `nbytes`; DiskError if the disk is full."""
        extents = self.file.allocate(nbytes)
        if self._warning is not None:
            logger.warning(self._warning)
            self._warning = None
        self._add_to_held(nbytes)
        return DiskAllocation(self, nbytes, extents)

    @property
    def held_bytes(self) -> int:
        """Bytes that are allocated now."""
        return self._add_to_held(0)

    def _add_to_held(self, nbytes: int) -> int:
        with self._lock:
            self._held_bytes += nbytes
            while self.freed:  # at each allocation: a program may never ask for the statistics
                self._held_bytes -= self.freed.popleft()
            return self._held_bytes

    @contextlib.contextmanager
    def working(self, what: str, chunk: Chunk) -> Iterator[None]:
        """Count time and bytes of a block that does `what` ("write" or "read") with a chunk; name the chunk in errors."""
        with self._lock:
            if self._busy_threads == 0:
                self._busy_since = time.perf_counter()
            self._busy_threads += 1
        try:
            yield
            with self._lock:
                self.moved_bytes += chunk.nbytes
        except OSError as error:
            raise DiskError(
                error.errno,
                f"offloading to disk failed to {what} {chunk.nbytes} bytes at byte {chunk.offset} of its file "
                f"({error.strerror}); this step's gradients are incomplete. Check the disk, or choose another directory",
                self.file.directory,
            ) from error
        finally:
            with self._lock:
                self._busy_threads -= 1
                if self._busy_threads == 0:
                    self.busy_ms += (time.perf_counter() - self._busy_since) * 1e3


Allocation = HostAllocation | DiskAllocation
Tier = HostTier | DiskTier


def trim() -> int:
    """Return unused slabs of all arenas and unused files on disk to the system; return the freed host memory [bytes]."""
    for file in extent_files():
        file.trim()
    return sum(host_arena(pinned).trim() for pinned in (False, True))
