"""Bytes that leave the device and come back.

A `OffloadedRange` stands for one range of bytes off the device; a `Offloader` makes them. Where there is no accelerator the copies
are synchronous and the states "leaving" and "returning" last no time; everything else is the same.

Note [streams and lifetimes]
*Leaving.* The range is copied on the leaving stream, which first waits for the compute stream: only then are the bytes
written. `source` keeps the memory until the copy has ended. The end is not polled for: the host runs ahead of the device,
so that every poll would say no. Instead `release` makes the compute stream wait for the copy and lets the memory go at
once; whatever the allocator puts there next is used after the wait, for the memory belongs to the compute stream. When
to release is the bound on what is in flight (`Offloader.release_older`, `Offloader.limit_in_flight`). While the source is still here,
backward takes it and nothing is copied back.

*Returning.* The buffer is allocated on the compute stream, current at that moment, and filled on the returning stream,
which first waits for the compute stream (what stood there before must have been read) and for the copy that left (it may
still be writing the host block). From disk, a thread issues these copies as it reads, and who uses the bytes first waits
until all are issued. Who uses the bytes makes its current stream wait for the copies. So the buffer belongs to the
compute stream like any tensor of plain autograd and is freed like one.

*Dying.* A graph may be dropped at any moment. If a copy from the source or into the buffer may still run, the compute
stream is made to wait for it before the memory goes (`FetchBuffer`). The allocation goes back with the last copy's event (Note
[who may free a host buffer], Note [who may free an extent]).

*A write to the source* while it leaves would tear the copy. Its version counter is read at the release: if it has moved,
the bytes are never handed out; backward raises.
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
    """One range of bytes off the device. Made by `Offloader.offload`; shared by all saved tensors that look at the range."""

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
        self._left: torch.Event | None = None
        if not copy_streams.on_host:
            self._home = copy_streams.compute_stream()
            self._source = tensor.detach()
        whole = in_one_piece(tensor, region)
        self._shape, self._dtype = whole.shape, whole.dtype  # of what travels
        self._left = allocation.write(copy_streams, whole)

    def has_storage_of(self, tensor: Tensor) -> bool:
        """Whether the storage the bytes came from still lives and is the tensor's (Note [identity of a saved tensor])."""
        return self._storage_ref() is tensor.untyped_storage()

    @property
    def is_torn(self) -> bool:
        """Whether the source was written to while it left, so that the bytes must not be used."""
        source = self._source
        return self._was_torn if source is None else source._version != self._region.version

    def release(self) -> None:
        """Let the source's memory go; the compute stream first waits for the copy."""
        if self._source is None:
            return
        if self._left is not None and self._home is not None:
            with self._offloader.copy_streams.stalling(self._home):
                self._home.wait_event(self._left)
        self._was_torn = self.is_torn
        self._source = None

    def fetch(self) -> None:
        """Begin to bring the bytes back, unless they are on the device."""
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
        """A tensor on the bytes, ready for the current stream, and the byte of the original storage with which its own begins.

        Raises:
            RuntimeError: if they were overwritten while they left.
            DiskError: if the disk failed to write or to read them.
        """
        source = self._source
        if self._was_torn if source is None else self.is_torn:
            raise RuntimeError(
                "activation offloading: a tensor was modified in place while it was copied to the host; "
                "clone it before the write"
            )
        if source is not None:
            return source, 0
        offloader, fetch_buffer = self._offloader, self._fetched
        if fetch_buffer is None:
            with offloader.lock:
                fetch_buffer = self._fetch_buffer()
        offloader.copy_streams.wait_for(fetch_buffer)
        return fetch_buffer.buffer, self._region.start

    def evict(self) -> None:
        """Let the bytes on the device go; a later use fetches anew. Call it on the thread that used them."""
        if self._source is None and self._fetched is None:
            return
        with self._offloader.lock:
            if self._source is not None:
                self.release()  # where backward begins, the last layer's sources are still here: at the peak of the step
            self._fetched = None

    def __del__(self) -> None:
        # Note [streams and lifetimes], "Dying".
        if self._source is not None and self._left is not None and self._home is not None:
            self._home.wait_event(self._left)
        self._allocation.free()
        reference = self._offloader.table.get(self._region)
        if reference is not None and reference() in (None, self):  # else the same region has been offloaded anew
            self._offloader.table.pop(self._region, None)


class _Flight(NamedTuple):
    layer_call: int
    nbytes: int
    offloaded: weakref.ref[OffloadedRange]


class Offloader:
    """Sends bytes of one device off and brings them back.

    Args:
        copy_streams: how they travel.
        tiers: where they go, in the order in which room is looked for.
        counters: where they are summed up.
    """

    def __init__(self, copy_streams: CopyStreams, tiers: Sequence[Tier], counters: Counters) -> None:
        self.copy_streams = copy_streams
        self.lock = threading.Lock()
        self.table: dict[Region, weakref.ref[OffloadedRange]] = {}  # what is off the device
        self._tiers = tiers
        self._counters = counters
        self.in_flight: deque[_Flight] = deque()  # oldest first; none without an accelerator
        self._in_flight_bytes = 0

    def offload(self, tensor: Tensor, region: Region, layer_call: int) -> OffloadedRange | None:
        """Send a range of bytes off; None where there is no room for it.

        Raises:
            DiskError: if they go to disk and that is full.
        """
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
        """Release the sources sent off `lag` or more layer calls before `layer_call`."""
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
            offloaded.release()


def in_one_piece(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor as a contiguous one: of the same look if it has the region for itself, else bytes."""
    if tensor.is_contiguous() and tensor.nbytes == region.nbytes:
        return tensor.detach()
    empty = torch.empty(0, dtype=torch.uint8, device=region.device)
    return empty.set_(tensor.untyped_storage(), region.start, (region.nbytes,), (1,))
