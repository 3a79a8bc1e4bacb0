"""Offloads ranges of bytes of one device and fetches them back. Without an accelerator copies are synchronous.

Note [streams and lifetimes]
*Offload.* The copy runs on a stream of its own, which first waits for the compute stream: only then are the bytes written. `_source`
keeps the memory until the copy has ended. The host does not poll for that end: `release_source` makes the compute stream wait for the
copy and drops the memory at once. The memory belongs to the compute stream, so that the allocator reuses it after that wait only. If
backward comes first, it uses the source and nothing is copied back.

*Fetch.* The buffer is allocated on the current compute stream and filled on another one. That stream first waits for the compute
stream, which may still read the memory's former content, and for the copy to the host, which may still write the block. Every user
waits until all copies are issued (from disk a thread issues them), and makes its current stream wait for them.

*Death.* A graph may be dropped at any moment. The compute stream waits for copies that may still run before their memory is freed
(`OffloadedRange.__del__`, `FetchBuffer.__del__`). The allocation is freed with the last copy's event.

*A write to the source* during the copy would tear the bytes. The release reads the version counter; after a write backward raises.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlx.offload.storage.arena import Account, Block
from rlx.offload.storage.tensor_bytes import Region


@dataclass
class Counters:
    """Running sums of the engine or of one layer, as in `OffloadStats`."""

    offloaded_bytes: int = 0
    kept_bytes: int = 0
    copied_bytes: int = 0
    recomputed_ms: float = 0.0
    copy_ms: float = 0.0
    stall_ms: float = 0.0


Mark = float | torch.Event


def mark(stream: torch.Stream | None) -> Mark:
    """Return a point in time: an event on a device's stream, or the host's clock if there is no stream [ms]."""
    if stream is None:
        return time.perf_counter() * 1e3
    # Blocking: a thread that waits for the event sleeps.
    event = torch.Event(stream.device, enable_timing=True, blocking=True)
    event.record(stream)
    return event


class Timeline:
    """Converts pairs of marks to milliseconds once the device has passed them; never waits for the device."""

    def __init__(self) -> None:
        self._pending: deque[tuple[tuple[Counters, ...], str, torch.Event, torch.Event]] = deque()
        self._lock = threading.Lock()

    def add(self, name: str, start: Mark, stop: Mark, *counters: Counters) -> None:
        if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
            self._pending.append((counters, name, start, stop))
            if len(self._pending) > 256:
                self.harvest()
        elif isinstance(start, float) and isinstance(stop, float):
            with self._lock:
                for counter in counters:
                    setattr(counter, name, getattr(counter, name) + stop - start)

    def harvest(self) -> None:
        with self._lock:
            while self._pending and self._pending[0][3].query():
                counters, name, start, stop = self._pending.popleft()
                ms = start.elapsed_time(stop)
                for counter in counters:
                    setattr(counter, name, getattr(counter, name) + ms)


class PendingTasks:
    """Counts tasks that other threads run; `wait` returns when all are done and raises the first failure."""

    def __init__(self) -> None:
        self._left = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def expect(self) -> None:
        with self._changed:
            self._left += 1

    def done(self, failure: BaseException | None = None) -> None:
        with self._changed:
            self._left -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)
            if self._failure is not None:
                raise copy.copy(self._failure)  # a raised error gets a traceback, which would keep frames alive


class FetchBuffer:
    """A contiguous device tensor that bytes are fetched into. Its stream `home` waits for the copies before it is freed."""

    tensor: Tensor

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, home: torch.Stream | None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.home = home
        self.copies: list[torch.Event] = []
        self.issued: PendingTasks | None = None  # set if other threads issue the copies
        self.allocated: torch.Event | None = None
        self._device = device

    def allocate(self) -> None:
        self.tensor = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        if self.home is not None:
            self.allocated = self.home.record_event()

    def __del__(self) -> None:
        if self.home is not None:
            for event in self.copies:
                self.home.wait_event(event)


class CopyStreams:
    """Copies of one device."""

    def __init__(self, device: torch.device, use_streams: bool, counters: Counters, timeline: Timeline) -> None:
        self.device = device
        self.on_host = device.type == "cpu"
        self._to_host = self._to_device = None
        if use_streams and not self.on_host:
            self._to_host, self._to_device = torch.Stream(device), torch.Stream(device)
        self._counters = counters
        self._timeline = timeline
        self._lock = threading.Lock()

    def compute_stream(self) -> torch.Stream | None:
        return None if self.on_host else torch.accelerator.current_stream(self.device)

    def device_is_current(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the device is current. A new thread would use device 0 otherwise."""
        return contextlib.nullcontext() if self.on_host else torch.accelerator.device_index(self.device.index)

    def copy_to_host(self, source: Tensor, block: Block) -> torch.Event | None:
        """Copy a contiguous tensor to the host, after the work that compute has queued; return the event that ends the copy."""
        compute = self.compute_stream()
        if compute is not None and self._to_host is not None:
            self._to_host.wait_event(compute.record_event())
        return self._copy(self._to_host or compute, source, block, to_host=True, is_waited_for=self._to_host is None)

    def copy_into(
        self, target: Tensor, block: Block, fetch_buffer: FetchBuffer, after: torch.Event | None = None
    ) -> torch.Event | None:
        """Copy a block into a part of a fetch buffer after the event `after`; return the event that ends the copy."""
        stream = self._to_device or fetch_buffer.home
        if stream is not None:
            for event in (fetch_buffer.allocated, after):
                if event is not None:
                    stream.wait_event(event)  # needless on one stream, but layers may compute on several
        is_waited_for = self._to_host is None and not (self.on_host and fetch_buffer.issued)
        copied = self._copy(stream, target, block, to_host=False, is_waited_for=is_waited_for)
        if copied is not None:
            fetch_buffer.copies.append(copied)
        return copied

    def wait_for(self, fetch_buffer: FetchBuffer) -> None:
        """Make the host wait until all copies into a fetch buffer are issued, and the current stream until they are done."""
        if self.on_host and fetch_buffer.issued is None:
            return
        stream = self.compute_stream()
        with self.stalling(stream):
            if fetch_buffer.issued is not None:
                fetch_buffer.issued.wait()
            if stream is not None:
                for event in fetch_buffer.copies:
                    stream.wait_event(event)
        if stream is not None and stream != fetch_buffer.home:
            fetch_buffer.tensor.record_stream(stream)  # fetched ahead by a layer that computes on another stream

    @contextlib.contextmanager
    def stalling(self, stream: torch.Stream | None) -> Iterator[None]:
        """Measure how long a compute stream is idle because it, or the host, waits inside the block."""
        start = mark(stream)
        yield
        self._timeline.add("stall_ms", start, mark(stream), self._counters)

    def _copy(
        self, stream: torch.Stream | None, tensor: Tensor, block: Block, to_host: bool, is_waited_for: bool
    ) -> torch.Event | None:
        start = mark(stream)
        with stream or contextlib.nullcontext():
            for on_device, on_host in block.pairs(tensor):
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=stream is not None)
        stop = mark(stream)
        with self._lock:
            self._counters.copied_bytes += tensor.nbytes
        self._timeline.add("copy_ms", start, stop, self._counters)
        if is_waited_for:
            self._timeline.add("stall_ms", start, stop, self._counters)
        return stop if isinstance(stop, torch.Event) else None


class HostAllocation:
    """A block of host memory."""

    __slots__ = ("_account", "_block", "_last_copy")

    def __init__(self, account: Account, block: Block) -> None:
        self._account = account
        self._block = block
        self._last_copy: torch.Event | None = None

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None:
        self._last_copy = copy_streams.copy_to_host(source, self._block)
        return self._last_copy

    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None:
        fetch_buffer.allocate()
        self._last_copy = copy_streams.copy_into(fetch_buffer.tensor, self._block, fetch_buffer, self._last_copy)

    def free(self) -> None:
        self._account.free(self._block, self._last_copy)


class HostTier:
    """Host memory, of one account of an arena."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def allocate(self, nbytes: int) -> HostAllocation | None:
        block = self._account.allocate(nbytes)
        return None if block is None else HostAllocation(self._account, block)

    @property
    def held_bytes(self) -> int:
        return self._account.held_bytes


class Allocation(Protocol):
    """Room in a tier: a `HostAllocation`, or a `DiskAllocation` of `disk.py`."""

    def write(self, copy_streams: CopyStreams, source: Tensor) -> torch.Event | None: ...
    def read(self, copy_streams: CopyStreams, fetch_buffer: FetchBuffer) -> None: ...
    def free(self) -> None: ...


class Tier(Protocol):
    """Holds offloaded bytes: a `HostTier` or a `DiskTier`."""

    def allocate(self, nbytes: int) -> Allocation | None: ...
    @property
    def held_bytes(self) -> int: ...


class OffloadedRange:
    """One range of bytes off the device. Made by `Offloader.offload`; shared by all saved tensors that are views of it."""

    def __init__(self, offloader: Offloader, tensor: Tensor, region: Region, allocation: Allocation) -> None:
        copy_streams = offloader.copy_streams
        self.nbytes = region.nbytes
        self._allocation = allocation
        self._offloader = offloader
        self._storage_ref = weakref.ref(tensor.untyped_storage())
        self._region = region
        self._source: Tensor | None = None
        self._fetched: FetchBuffer | None = None
        self._was_torn = False
        self._home: torch.Stream | None = None
        self._copied: torch.Event | None = None
        if not copy_streams.on_host:
            self._home, self._source = copy_streams.compute_stream(), tensor.detach()
        whole = in_one_piece(tensor, region)
        self._shape, self._dtype = whole.shape, whole.dtype
        self._copied = allocation.write(copy_streams, whole)

    def has_storage_of(self, tensor: Tensor) -> bool:
        return self._storage_ref() is tensor.untyped_storage()

    @property
    def is_torn(self) -> bool:
        """Whether the source was written to during the copy, so that the bytes must not be used."""
        source = self._source
        return self._was_torn if source is None else source._version != self._region.version

    def release_source(self) -> None:
        if self._source is None:
            return
        if self._copied is not None and self._home is not None:
            with self._offloader.copy_streams.stalling(self._home):
                self._home.wait_event(self._copied)
        self._was_torn = self.is_torn
        self._source = None

    def fetch(self) -> None:
        with self._offloader.lock:
            if self._source is None:
                self._fetch_buffer()

    def _fetch_buffer(self) -> FetchBuffer:
        if self._fetched is None:
            copy_streams = self._offloader.copy_streams
            home = None if copy_streams.on_host else copy_streams.compute_stream()
            fetch_buffer = FetchBuffer(self._shape, self._dtype, copy_streams.device, home)
            self._allocation.read(copy_streams, fetch_buffer)
            self._fetched = fetch_buffer
        return self._fetched

    def on_device(self) -> tuple[Tensor, int]:
        """Return a tensor on the bytes, ready for the current stream, and the offset of its storage in the original one [bytes].

        RuntimeError if the source was written to during the copy, DiskError if the disk failed.
        """
        source = self._source
        if self._was_torn if source is None else self.is_torn:
            raise RuntimeError(
                "activation offloading: a tensor was modified in place while it was copied to the host; "
                "clone it before the write"
            )
        if source is not None:
            return source, 0
        fetch_buffer = self._fetched
        if fetch_buffer is None:
            with self._offloader.lock:
                fetch_buffer = self._fetch_buffer()
        self._offloader.copy_streams.wait_for(fetch_buffer)
        return fetch_buffer.tensor, self._region.start

    def evict(self) -> None:
        """Evict the bytes from the device; a later use fetches them again. Call it on the thread that used them."""
        if self._source is None and self._fetched is None:
            return
        with self._offloader.lock:
            if self._source is not None:
                self.release_source()  # as backward begins, at the peak of the step, the last layer still has its sources
            self._fetched = None

    def __del__(self) -> None:
        # Note [streams and lifetimes], "Death".
        if self._source is not None and self._copied is not None and self._home is not None:
            self._home.wait_event(self._copied)
        self._allocation.free()
        reference = self._offloader.table.get(self._region)
        if reference is not None and reference() in (None, self):  # else the region was offloaded once more
            self._offloader.table.pop(self._region, None)


class _Flight(NamedTuple):
    layer_call: int  # its number
    nbytes: int
    offloaded: weakref.ref[OffloadedRange]


class Offloader:
    """Offloads bytes of one device to tiers, which are asked for room in their order."""

    def __init__(self, copy_streams: CopyStreams, tiers: Sequence[Tier], counters: Counters) -> None:
        self.copy_streams = copy_streams
        self.lock = threading.Lock()
        self.table: dict[Region, weakref.ref[OffloadedRange]] = {}  # the ranges that are off the device
        self.in_flight: deque[_Flight] = deque()  # oldest first; empty without an accelerator
        self._in_flight_bytes = 0
        self._tiers = tiers
        self._counters = counters

    def offload(self, tensor: Tensor, region: Region, layer_call: int) -> OffloadedRange | None:
        """Begin to copy a range of bytes to the first tier with room; None if no tier has any, DiskError if the disk is full."""
        nbytes = region.nbytes
        with self.lock:
            for tier in self._tiers:
                if (allocation := tier.allocate(nbytes)) is not None:
                    break
            else:
                return None
            offloaded = OffloadedRange(self, tensor, region, allocation)
            self.table[region] = weakref.ref(offloaded)
            self._counters.offloaded_bytes += nbytes
            if not self.copy_streams.on_host:
                self.in_flight.append(_Flight(layer_call, nbytes, weakref.ref(offloaded)))
                self._in_flight_bytes += nbytes
            return offloaded

    def release_older(self, layer_call: int, lag: int) -> None:
        """Release the sources that were offloaded `lag` or more layer calls before `layer_call`."""
        with self.lock:
            while self.in_flight and self.in_flight[0].layer_call <= layer_call - lag:
                self._release_oldest()

    def limit_in_flight(self, max_bytes: int) -> None:
        with self.lock:
            while self.in_flight and self._in_flight_bytes > max_bytes:
                self._release_oldest()

    def _release_oldest(self) -> None:
        flight = self.in_flight.popleft()
        self._in_flight_bytes -= flight.nbytes
        if (offloaded := flight.offloaded()) is not None:
            offloaded.release_source()


def in_one_piece(tensor: Tensor, region: Region) -> Tensor:
    """Return a region as a contiguous tensor: with the tensor's shape and dtype if it covers the region, else as uint8."""
    if tensor.is_contiguous() and tensor.nbytes == region.nbytes:
        return tensor.detach()
    empty = torch.empty(0, dtype=torch.uint8, device=region.device)
    return empty.set_(tensor.untyped_storage(), region.start, (region.nbytes,), (1,))
