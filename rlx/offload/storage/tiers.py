"""Where bytes wait off the device: in host memory, or on disk.

Note [reads and writes cannot wait for each other]
Bytes go to and from the disk in chunks, through page-locked staging buffers. Forward takes a staging buffer, queues the
copy into it and hands it to a writer thread, which waits for the copy, writes the chunk and returns the buffer; forward
waits when all are in use. A reader thread waits until the writes of what it reads are done, takes a staging buffer, reads
and queues the copy to the device. There is no circle in who waits for whom: writers wait for the device only; readers
wait for writers and have threads and staging buffers of their own, at most one buffer a thread; forward and backward wait
for writers and readers, and no thread of these ever takes a lock that is held while one waits. On the device a copy
waits only for what was queued before it.

Note [who may free an extent]
As a host buffer's owner (Note [who may free a host buffer]), so may an extent's die at any moment, with writes and reads
of it queued or running. A queued task holds the allocation weakly and finds it gone; a running one holds it. So the last to
let go returns the extents, which takes no lock: it appends them to a queue that is emptied before more is taken. What
the allocation holds counts no more from the moment its owner is done with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlx.offload.storage.arena import Account, Block, HostArena, as_bytes, host_arena
from rlx.offload.storage.copy_streams import CopyStreams, FetchBuffer, PendingTasks
from rlx.offload.storage.pages import Pages
from rlx.offload.storage.ranges import Extent
from rlx.offload.storage.spill_file import DiskError, ExtentFile, extent_files
from rlx.offload.storage.staging import WRITE_BUFFERS, staging_bytes

logger = logging.getLogger("rlx.offload")


class Allocation(Protocol):
    """Room for one range of bytes off the device."""

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None:
        """Begin to send a contiguous tensor here; returns the event after which the source is not read any more."""

    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None:
        """Begin to bring back what was sent here, into a buffer made now."""

    def free(self) -> None:
        """The owner is done. Never blocks, on any thread."""


class Tier(Protocol):
    """One user's room in one tier."""

    def allocate(self, nbytes: int) -> Allocation | None:
        """Room for `nbytes`, or None where there is none."""

    @property
    def held_bytes(self) -> int:
        """Bytes that wait here now."""


class HostAllocation:
    """A block of host memory."""

    __slots__ = ("_account", "_block", "_last_copy")

    def __init__(self, account: Account, block: Block) -> None:
        self._account = account
        self._block = block
        self._last_copy: torch.Event | None = None

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None:
        """See `Allocation.write`."""
        self._last_copy = copy_streams.copy_to_host(source, self._block)
        return self._last_copy

    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None:
        """See `Allocation.read`. The copy that left may still be writing the block."""
        self._last_copy = copy_streams.copy_to_device(self._block, fetch_buffer, after=self._last_copy)

    def free(self) -> None:
        """See `Allocation.free`."""
        self._account.free(self._block, self._last_copy)


class HostTier:
    """Host memory.

    Args:
        account: where it comes from.
    """

    def __init__(self, account: Account) -> None:
        self._account = account

    def allocate(self, nbytes: int) -> HostAllocation | None:
        """See `Tier.allocate`."""
        block = self._account.allocate(nbytes)
        return None if block is None else HostAllocation(self._account, block)

    @property
    def held_bytes(self) -> int:
        """See `Tier.held_bytes`."""
        return self._account.held_bytes


class StagingBuffers:
    """Host memory between the device and the disk, in a bounded number of buffers.

    Args:
        arena: where it comes from.
        chunk_bytes: size of a buffer; `nbytes` is the most that all together take.
    """

    def __init__(self, arena: HostArena, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.nbytes = staging_bytes(chunk_bytes)
        self._account = arena.account(self.nbytes, "disk_buffers")
        self._free_to_write = threading.BoundedSemaphore(WRITE_BUFFERS)
        self._has_warned = False

    def allocate_to_write(self, nbytes: int, copy_streams: CopyStreams) -> Block:
        """A buffer to write from; waits until a writer returns one if all are in use."""
        if not self._free_to_write.acquire(blocking=False):
            with copy_streams.stalling(copy_streams.compute_stream()):
                self._free_to_write.acquire()
        try:
            return self.allocate(nbytes)
        except BaseException:
            self._free_to_write.release()
            raise

    def free_written(self, block: Block) -> None:
        """Return a buffer that was written from."""
        self.free(block, None)
        self._free_to_write.release()

    def allocate(self, nbytes: int) -> Block:
        """A buffer for a reader thread."""
        block = self._account.allocate(nbytes)
        if block is None:
            # What is on disk must come back. The account has room by construction: others hold all the arena may have.
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "activation offloading: the host arena is full and has no page-locked memory left for copies to and "
                    "from the disk; up to %d bytes of pageable memory are used beside it. Raise the arena's limit",
                    self.nbytes,
                )
            block = Block(nbytes, [], [Pages(nbytes, is_locked=False).bytes])
        return block

    def free(self, block: Block, after: torch.Event | None) -> None:
        """Return a reader's buffer; `after`: the event that ends the copy from it."""
        if block.extents:
            self._account.free(block, after)
        elif after is not None:
            after.synchronize()


class Chunk(NamedTuple):
    """A part of a allocation that goes through one staging buffer."""

    offset: int  # in the file
    first_byte: int  # of the allocation's bytes
    nbytes: int  # a multiple of ALIGN_BYTES; the last chunk ends with bytes that mean nothing


class DiskAllocation:
    """Extents of a file. Nothing but tasks that run and the owner hold it (Note [who may free an extent])."""

    def __init__(self, tier: DiskTier, nbytes: int, extents: list[Extent]) -> None:
        self.tier = tier
        self.written = PendingTasks()
        self._nbytes = nbytes
        self._extents = extents

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None:
        """See `Allocation.write`. Waits where the disk does not keep up."""
        here, left, source = weakref.ref(self), None, as_bytes(source)
        for chunk in self._chunks():
            block = self.tier.staging.allocate_to_write(chunk.nbytes, copy_streams)
            try:
                left = copy_streams.copy_to_host(source[chunk.first_byte : chunk.first_byte + chunk.nbytes], block)
            except BaseException:
                self.tier.staging.free_written(block)
                raise
            self.written.expect(1)
            self.tier.file.submit_write(_Write(here, self.tier, self.written, chunk, copy_streams, block, left).run)
        return left

    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None:
        """See `Allocation.read`."""
        fetch_buffer.allocate()
        here, fetch_buffer.issued = weakref.ref(self), PendingTasks()
        for chunk in self._chunks():
            fetch_buffer.issued.expect(1)
            self.tier.file.submit_read(
                _Read(
                    here, self.tier, self.written, chunk, copy_streams, weakref.ref(fetch_buffer), fetch_buffer.issued
                ).run
            )

    def free(self) -> None:
        """See `Allocation.free`."""
        self.tier.given.append(self._nbytes)

    def __del__(self) -> None:
        self.tier.file.returned.append(self._extents)

    def _chunks(self) -> Iterator[Chunk]:
        first_byte = 0
        for extent in self._extents:
            for start in range(0, extent.length, self.tier.staging.chunk_bytes):
                nbytes = min(self.tier.staging.chunk_bytes, extent.length - start)
                yield Chunk(extent.start + start, first_byte, nbytes)
                first_byte += nbytes


class _Write(NamedTuple):
    """Writes one chunk, on a writer thread."""

    allocation: weakref.ref[DiskAllocation]
    tier: DiskTier
    written: PendingTasks
    chunk: Chunk
    copy_streams: CopyStreams
    block: Block
    copied: torch.Event | None

    def run(self) -> None:
        failure: BaseException | None = None
        try:
            if self.copied is not None:
                with self.copy_streams.device_is_current():
                    self.copied.synchronize()
            allocation = self.allocation()
            if allocation is not None:
                with self.tier.working("write", self.chunk):
                    self.tier.file.write(self.block.views, self.chunk.offset)
        except BaseException as error:
            failure = _without_frames(error)
        allocation = None  # before anybody goes on: all that the allocation held is free then
        self.tier.staging.free_written(self.block)
        self.written.done(failure)


class _Read(NamedTuple):
    """Reads one chunk and queues its copy to the device, on a reader thread."""

    allocation: weakref.ref[DiskAllocation]
    tier: DiskTier
    written: PendingTasks
    chunk: Chunk
    copy_streams: CopyStreams
    fetch_buffer: weakref.ref[FetchBuffer]
    issued: PendingTasks

    def run(self) -> None:
        failure: BaseException | None = None
        copied: torch.Event | None = None
        try:
            self.written.wait()
            with self.copy_streams.device_is_current():
                copied = self._bring_back()
        except BaseException as error:
            failure = _without_frames(error)
        self.issued.done(failure)
        if copied is not None:
            with self.copy_streams.device_is_current():
                copied.synchronize()  # else this thread would fill one buffer after another while the device is busy

    def _bring_back(self) -> torch.Event | None:
        allocation, fetch_buffer = self.allocation(), self.fetch_buffer()
        if allocation is None or fetch_buffer is None:
            return None
        staging, copied = self.tier.staging, None
        block = staging.allocate(self.chunk.nbytes)
        try:
            with self.tier.working("read", self.chunk):
                self.tier.file.read(block.views, self.chunk.offset)
            first_byte = self.chunk.first_byte
            target = as_bytes(fetch_buffer.buffer)[first_byte : first_byte + block.nbytes]
            copied = self.copy_streams.copy_into(target, block, fetch_buffer, after=None, is_ahead=True)
        finally:
            staging.free(block, copied)
        return copied


def _without_frames(error: BaseException) -> BaseException:
    # Kept until somebody reads; the frames of a traceback would keep the allocation and the buffer as long.
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class DiskTier:
    """Disk space.

    Args:
        file: where it is.
        staging: host memory on the way.
        warning: said when the tier is first used; None: nothing.
    """

    def __init__(self, file: ExtentFile, staging: StagingBuffers, warning: str | None) -> None:
        self.file = file
        self.staging = staging
        self.given: deque[int] = deque()
        self.moved_bytes = 0
        self.busy_ms = 0.0  # time in which at least one thread was writing or reading
        self._held_bytes = 0
        self._warning = warning
        self._busy_threads = 0
        self._busy_since = 0.0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> DiskAllocation:
        """See `Tier.allocate`.

        Raises:
            DiskError: if the disk is full.
        """
        extents = self.file.allocate(nbytes)
        if self._warning is not None:
            logger.warning(self._warning)
            self._warning = None
        with self._lock:
            self._held_bytes += nbytes
        return DiskAllocation(self, nbytes, extents)

    @property
    def held_bytes(self) -> int:
        """See `Tier.held_bytes`."""
        with self._lock:
            while self.given:
                self._held_bytes -= self.given.popleft()
            return self._held_bytes

    @contextlib.contextmanager
    def working(self, what: str, chunk: Chunk) -> Iterator[None]:
        """Count the time and the bytes of a block of code that writes or reads a chunk, and name the chunk if it fails."""
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
                f"activation offloading to disk failed to {what} {chunk.nbytes} bytes at byte {chunk.offset} of its file "
                f"({error.strerror}); this step's gradients are incomplete: see to the disk, or choose another "
                "OffloadOptions.directory",
                self.file.directory,
            ) from error
        finally:
            with self._lock:
                self._busy_threads -= 1
                if self._busy_threads == 0:
                    self.busy_ms += (time.perf_counter() - self._busy_since) * 1e3


def trim() -> int:
    """Give back to the system what waits for nothing: host memory of all arenas, and the room of files on disk.

    Returns:
        Host memory that was given back [bytes].
    """
    for file in extent_files():
        file.trim()
    return sum(host_arena(pinned).trim() for pinned in (False, True))
