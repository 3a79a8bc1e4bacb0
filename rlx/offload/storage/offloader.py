"""Bytes that leave the device and come back.

A `OffloadedRange` stands for one range of bytes off the device; a `Offloader` makes them. Where there is no accelerator the copies
are synchronous and the states "leaving" and "returning" last no time; everything else is the same.

Note [streams and lifetimes]
*Leaving.* The range is copied on the leaving stream, which first waits for the compute stream: only then are the bytes
written. `source` keeps the memory until the copy has ended. The end is not polled for: the host runs ahead of the device,
so that every poll would say no. Instead `release` makes the compute stream wait for the copy and lets the memory go at
once; whatever the allocator puts there next is used after the wait, for the memory belongs to the compute stream. When
to release is the bound on what is in flight (`Offloader.begin_layer`, `Offloader.bound`). While the source is still here,
backward takes it and nothing is copied back.

*Returning.* The buffer is allocated on the compute stream, current at that moment, and filled on the returning stream,
which first waits for the compute stream (what stood there before must have been read) and for the copy that left (it may
still be writing the host block). From disk, a thread issues these copies as it reads, and who uses the bytes first waits
until all are issued. Who uses the bytes makes its current stream wait for the copies. So the buffer belongs to the
compute stream like any tensor of plain autograd and is freed like one.

*Dying.* A graph may be dropped at any moment. If a copy from the source or into the buffer may still run, the compute
stream is made to wait for it before the memory goes (`Arrival`). The place goes back with the last copy's event (Note
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

from rlx.offload.storage.copy_streams import Arrival, CopyStreams
from rlx.offload.storage.regions import Region
from rlx.offload.storage.stats import Counters
from rlx.offload.storage.tiers import Allocation, Tier


class OffloadedRange:
    """One range of bytes off the device. Made by `Offloader.park`; shared by all saved tensors that look at the range."""

    def __init__(self, mover: Offloader, tensor: Tensor, region: Region, place: Allocation) -> None:
        copier = mover.copier
        self.nbytes = region.nbytes
        self._place = place
        self._mover = mover
        self._storage_ref = weakref.ref(tensor.untyped_storage())
        self._region = region
        self._source: Tensor | None = None
        self._arrival: Arrival | None = None
        self._was_torn = False
        self._home: torch.Stream | None = None
        self._left: torch.Event | None = None
        if not copier.on_host:
            self._home = copier.compute_stream()
            self._source = tensor.detach()
        whole = in_one_piece(tensor, region)
        self._shape, self._dtype = whole.shape, whole.dtype  # of what travels
        self._left = place.write(copier, whole)

    def stands_for(self, tensor: Tensor) -> bool:
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
            with self._mover.copier.stalling(self._home):
                self._home.wait_event(self._left)
        self._was_torn = self.is_torn
        self._source = None

    def fetch(self) -> None:
        """Begin to bring the bytes back, unless they are on the device."""
        with self._mover.lock:
            if self._source is None:
                self._fetched()

    def _fetched(self) -> Arrival:
        if self._arrival is None:
            copier = self._mover.copier
            home = None if copier.on_host else copier.compute_stream()
            arrival = Arrival(self._shape, self._dtype, copier.device, home)
            self._place.read(copier, arrival)
            self._arrival = arrival
        return self._arrival

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
        mover, arrival = self._mover, self._arrival
        if arrival is None:
            with mover.lock:
                arrival = self._fetched()
        mover.copier.wait_for(arrival)
        return arrival.buffer, self._region.start

    def unload(self) -> None:
        """Let the bytes on the device go; a later use fetches anew. Call it on the thread that used them."""
        if self._source is None and self._arrival is None:
            return
        with self._mover.lock:
            if self._source is not None:
                self.release()  # where backward begins, the last layer's sources are still here: at the peak of the step
            self._arrival = None

    def __del__(self) -> None:
        # Note [streams and lifetimes], "Dying".
        if self._source is not None and self._left is not None and self._home is not None:
            self._home.wait_event(self._left)
        self._place.give()
        reference = self._mover.table.get(self._region)
        if reference is not None and reference() in (None, self):  # else the same region has been parked anew
            self._mover.table.pop(self._region, None)


class _Flight(NamedTuple):
    layer_call: int
    nbytes: int
    parked: weakref.ref[OffloadedRange]


class Offloader:
    """Sends bytes of one device off and brings them back.

    Args:
        copier: how they travel.
        stores: where they go, in the order in which room is looked for.
        counters: where they are summed up.
    """

    def __init__(self, copier: CopyStreams, stores: Sequence[Tier], counters: Counters) -> None:
        self.copier = copier
        self.lock = threading.Lock()
        self.table: dict[Region, weakref.ref[OffloadedRange]] = {}  # what is off the device
        self._stores = stores
        self._counters = counters
        self.in_flight: deque[_Flight] = deque()  # oldest first; none without an accelerator
        self._in_flight_bytes = 0

    def park(self, tensor: Tensor, region: Region, layer_call: int) -> OffloadedRange | None:
        """Send a range of bytes off; None where there is no room for it.

        Raises:
            DiskError: if they go to disk and that is full.
        """
        nbytes = region.nbytes
        with self.lock:
            for store in self._stores:
                place = store.take(nbytes)
                if place is not None:
                    break
            else:
                return None
            parked = OffloadedRange(self, tensor, region, place)
            self.table[region] = weakref.ref(parked)
            self._counters.offloaded_bytes += nbytes
            if not self.copier.on_host:
                self.in_flight.append(_Flight(layer_call, nbytes, weakref.ref(parked)))
                self._in_flight_bytes += nbytes
            return parked

    def begin_layer(self, layer_call: int, lag: int) -> None:
        """Release the sources sent off `lag` or more layer calls before `layer_call`."""
        with self.lock:
            while self.in_flight and self.in_flight[0].layer_call <= layer_call - lag:
                self._release_oldest()

    def bound(self, max_bytes: int) -> None:
        """Release the oldest sources until at most `max_bytes` are in flight."""
        with self.lock:
            while self.in_flight and self._in_flight_bytes > max_bytes:
                self._release_oldest()

    def _release_oldest(self) -> None:
        flight = self.in_flight.popleft()
        self._in_flight_bytes -= flight.nbytes
        parked = flight.parked()
        if parked is not None:
            parked.release()


def in_one_piece(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor as a contiguous one: of the same look if it has the region for itself, else bytes."""
    if tensor.is_contiguous() and tensor.nbytes == region.nbytes:
        return tensor.detach()
    empty = torch.empty(0, dtype=torch.uint8, device=region.device)
    return empty.set_(tensor.untyped_storage(), region.start, (region.nbytes,), (1,))
