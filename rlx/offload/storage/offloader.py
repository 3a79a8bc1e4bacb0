"""Offloads ranges of bytes of one device and fetches them back.

An `Offloader` makes `OffloadedRange`s, one for each range of bytes off the device. Without an accelerator copies are
synchronous, so that none is ever in flight.

Note [streams and lifetimes]
*Offload.* The range is copied on a stream of its own, which first waits for the compute stream: only then are the bytes
written. `_source` keeps the memory until the copy has ended. The host does not poll for that end, for it runs ahead of the
device. Instead `release_source` makes the compute stream wait for the copy and drops the memory at once. The memory belongs to
the compute stream, so that the allocator hands it out after that wait only. `Offloader.release_older` and `limit_in_flight`
decide when to release. If backward comes before the release, it uses the source and nothing is copied back.

*Fetch.* The buffer is allocated on the compute stream that is current at that moment, and filled on another stream. That stream
first waits for the compute stream, which may still read the memory's former content, and for the copy to the host, which may
still write the block. From disk, a thread issues these copies as it reads, and the first user of the bytes waits until all are
issued. Every user makes its current stream wait for the copies. So the buffer is freed like any tensor of plain autograd.

*Death.* A graph may be dropped at any moment. If a copy from the source or into the buffer may still run, the compute stream is
made to wait for it before the memory is freed (`OffloadedRange.__del__`, `FetchBuffer.__del__`). The allocation is freed with
the last copy's event (Note [who may free a host buffer], Note [who may free an extent]).

*A write to the source* during the copy would tear the bytes. The release reads the version counter. If it has changed, the
bytes are never handed out, and backward raises.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.offload.storage.copy_streams import CopyStreams, FetchBuffer
from rlx.offload.storage.regions import Region
from rlx.offload.storage.stats import Counters
from rlx.offload.storage.tiers import Allocation, Tier


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
        """Return whether the tensor is on the storage that the bytes came from (Note [identity of a saved tensor])."""
        return self._storage_ref() is tensor.untyped_storage()

    @property
    def is_torn(self) -> bool:
        """Whether the source was written to during the copy, so that the bytes must not be used."""
        source = self._source
        return self._was_torn if source is None else source._version != self._region.version

    def release_source(self) -> None:
        """Release the source's memory, after the compute stream has waited for the copy."""
        if self._source is None:
            return
        if self._copied is not None and self._home is not None:
            with self._offloader.copy_streams.stalling(self._home):
                self._home.wait_event(self._copied)
        self._was_torn = self.is_torn
        self._source = None

    def fetch(self) -> None:
        """Begin to copy the bytes to the device, unless they are there."""
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

        Raises:
            RuntimeError: if the source was written to during the copy.
            DiskError: if the disk failed to write or to read the bytes.
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
                allocation = tier.allocate(nbytes)
                if allocation is not None:
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
        """Release the oldest sources until at most `max_bytes` are in flight."""
        with self.lock:
            while self.in_flight and self._in_flight_bytes > max_bytes:
                self._release_oldest()

    def _release_oldest(self) -> None:
        flight = self.in_flight.popleft()
        self._in_flight_bytes -= flight.nbytes
        offloaded = flight.offloaded()
        if offloaded is not None:
            offloaded.release_source()


def in_one_piece(tensor: Tensor, region: Region) -> Tensor:
    """Return a region as a contiguous tensor: with the tensor's shape and dtype if it covers the region, else as uint8."""
    if tensor.is_contiguous() and tensor.nbytes == region.nbytes:
        return tensor.detach()
    empty = torch.empty(0, dtype=torch.uint8, device=region.device)
    return empty.set_(tensor.untyped_storage(), region.start, (region.nbytes,), (1,))
