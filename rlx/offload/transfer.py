"""Bytes that leave the device and come back.

A `Parked` stands for one range of bytes off the device; a `Mover` makes them. Where there is no accelerator the copies
are synchronous and the states "leaving" and "returning" last no time; everything else is the same.

Note [streams and lifetimes]
*Leaving.* The range is copied on the leaving stream, which first waits for the compute stream: only then are the bytes
written. `source` keeps the memory until the copy has ended. The end is not polled for: the host runs ahead of the device,
so that every poll would say no. Instead `release` makes the compute stream wait for the copy and lets the memory go at
once; whatever the allocator puts there next is used after the wait, for the memory belongs to the compute stream. When
to release is the bound on what is in flight (`Mover.begin_layer`, `Mover.bound`). While the source is still here,
backward takes it and nothing is copied back.

*Returning.* The buffer is allocated on the compute stream, current at that moment, and filled on the returning stream,
which first waits for the compute stream (what stood there before must have been read) and for the copy that left (it may
still be writing the host block). Who uses the bytes makes its current stream wait for the copy. So the buffer belongs to
the compute stream like any tensor of plain autograd and is freed like one.

*Dying.* A graph may be dropped at any moment. If a copy from the source or into the buffer may still run, the compute
stream is made to wait for it before the memory goes. The host block goes to the arena's queue with the last copy's event
(Note [who may free a host buffer]).

*A write to the source* while it leaves would tear the copy. Its version counter is read at the release: if it has moved,
the bytes are never handed out; backward raises.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.offload.arena import Account, Block
from rlx.offload.identity import Region
from rlx.offload.stats import Counters, Mark, Timeline, mark


class OnDevice(NamedTuple):
    """A storage on the device and the byte of the original one with which it begins."""

    storage: torch.UntypedStorage
    first_byte: int


class Parked:
    """One range of bytes off the device. Made by `Mover.park`; shared by all saved tensors that look at the range."""

    def __init__(self, mover: Mover, tensor: Tensor, region: Region, block: Block) -> None:
        self._mover = mover
        self._storage_ref = weakref.ref(tensor.untyped_storage())
        self._region = region
        self._block = block
        self._source: Tensor | None = tensor.detach()
        self._buffer: Tensor | None = None
        self._was_torn = False
        self._home = mover.compute_stream()
        self._last_copy: torch.Event | None = None
        self._last_copy = mover.copy_off(_bytes_of(tensor.untyped_storage(), region), block)
        if self._home is None:
            self.release()

    def stands_for(self, tensor: Tensor) -> bool:
        """Whether the storage the bytes came from still lives and is the tensor's (Note [identity of a saved tensor])."""
        return self._storage_ref() is tensor.untyped_storage()

    @property
    def nbytes(self) -> int:
        """Length of the range [bytes]."""
        return self._region.nbytes

    @property
    def is_torn(self) -> bool:
        """Whether the source was written to while it left, so that the bytes must not be used."""
        source = self._source
        return self._was_torn if source is None else source._version != self._region.version

    def release(self) -> None:
        """Let the source's memory go; the compute stream first waits for the copy."""
        source, event = self._source, self._last_copy
        if source is None:
            return
        if event is not None and self._home is not None:
            self._mover.wait(self._home, event)
        self._was_torn = self.is_torn
        self._source = None

    def fetch(self) -> None:
        """Begin to bring the bytes back, unless they are on the device."""
        with self._mover.lock:
            if self._source is None:
                self._fetched()

    def _fetched(self) -> tuple[Tensor, torch.Stream | None, torch.Event | None]:
        if self._buffer is None:
            device, left = self._region.device, self._last_copy
            self._buffer, self._home, self._last_copy = self._mover.copy_back(self._block, device, left)
        return self._buffer, self._home, self._last_copy

    def on_device(self) -> OnDevice:
        """The bytes, ready for the current stream.

        Raises:
            RuntimeError: if they were overwritten while they left.
        """
        source = self._source
        if self.is_torn:
            raise RuntimeError(
                "activation offloading: a tensor was modified in place while it was copied to the host; "
                "clone it before the write"
            )
        if source is not None:
            return OnDevice(source.untyped_storage(), 0)
        with self._mover.lock:
            buffer, home, event = self._fetched()
        stream = self._mover.compute_stream()
        if event is not None and stream is not None:
            self._mover.wait(stream, event)
            if stream != home:
                buffer.record_stream(stream)  # fetched ahead by a layer that computes on another stream
        return OnDevice(buffer.untyped_storage(), self._region.start)

    def unload(self) -> None:
        """Let the device's copy go again; a later use fetches anew. Call it on the thread that used the bytes."""
        with self._mover.lock:
            if self._buffer is not None and self._home is not None and self._last_copy is not None:
                self._home.wait_event(self._last_copy)
            self._buffer = None

    def __del__(self) -> None:
        # Note [streams and lifetimes], "Dying".
        if (
            self._home is not None
            and self._last_copy is not None
            and (self._source is not None or self._buffer is not None)
        ):
            self._home.wait_event(self._last_copy)
        self._mover.account.give(self._block, self._last_copy)


class _Flight(NamedTuple):
    layer_call: int
    nbytes: int
    parked: weakref.ref[Parked]


class Mover:
    """Copies between one device and host memory.

    Args:
        device: whose bytes move; on the CPU copies are synchronous.
        use_streams: copy on two streams of the mover's own, one each way, instead of on the compute stream.
        account: where the host memory comes from.
        counters: where copies and stalls are summed up.
        timeline: how their time is measured.
    """

    def __init__(
        self, device: torch.device, use_streams: bool, account: Account, counters: Counters, timeline: Timeline
    ) -> None:
        self.account = account
        self.lock = threading.Lock()
        self._device = device
        self._on_host = device.type == "cpu"
        self._leaving = self._returning = None
        if use_streams and not self._on_host:
            self._leaving, self._returning = torch.Stream(device), torch.Stream(device)
        self._counters = counters
        self._timeline = timeline
        self._in_flight: deque[_Flight] = deque()
        self._in_flight_bytes = 0

    def compute_stream(self) -> torch.Stream | None:
        """The stream current at this moment; None without an accelerator."""
        return None if self._on_host else torch.accelerator.current_stream(self._device)

    def park(self, tensor: Tensor, region: Region, layer_call: int) -> Parked | None:
        """Send a range of bytes off; None where the host has no room for it."""
        with self.lock:
            block = self.account.take(region.nbytes)
            if block is None:
                return None
            parked = Parked(self, tensor, region, block)
            self._counters.offloaded_bytes += region.nbytes
            if not self._on_host:
                self._in_flight.append(_Flight(layer_call, region.nbytes, weakref.ref(parked)))
                self._in_flight_bytes += region.nbytes
            return parked

    def begin_layer(self, layer_call: int, lag: int) -> None:
        """Release the sources sent off `lag` or more layer calls before `layer_call`."""
        with self.lock:
            while self._in_flight and self._in_flight[0].layer_call <= layer_call - lag:
                self._release_oldest()

    def bound(self, max_bytes: int) -> None:
        """Release the oldest sources until at most `max_bytes` are in flight."""
        with self.lock:
            while self._in_flight and self._in_flight_bytes > max_bytes:
                self._release_oldest()

    def copy_off(self, source: Tensor, block: Block) -> torch.Event | None:
        """Copy bytes into a block; returns the event that ends the copy."""
        with self._copying(self._leaving, after=None) as stream:
            start = mark(stream)
            first = 0
            for view in block.views:
                view.copy_(source[first : first + view.numel()], non_blocking=stream is not None)
                first += view.numel()
            return self._copied(start, mark(stream), block.nbytes)

    def copy_back(
        self, block: Block, device: torch.device, left: torch.Event | None
    ) -> tuple[Tensor, torch.Stream | None, torch.Event | None]:
        """Copy a block into a new buffer; returns it, the stream it belongs to, and the event that ends the copy."""
        home = self.compute_stream()
        buffer = torch.empty(block.nbytes, dtype=torch.uint8, device=device)
        with self._copying(self._returning, after=left) as stream:
            start = mark(stream)
            first = 0
            for view in block.views:
                buffer[first : first + view.numel()].copy_(view, non_blocking=stream is not None)
                first += view.numel()
            event = self._copied(start, mark(stream), block.nbytes)
        return buffer, home, event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make a compute stream wait for a copy, and measure for how long it does."""
        start = mark(stream)
        stream.wait_event(event)
        self._timeline.add("stall_ms", start, mark(stream), self._counters)

    def _release_oldest(self) -> None:
        flight = self._in_flight.popleft()
        self._in_flight_bytes -= flight.nbytes
        parked = flight.parked()
        if parked is not None:
            parked.release()

    @contextlib.contextmanager
    def _copying(self, stream: torch.Stream | None, after: torch.Event | None) -> Iterator[torch.Stream | None]:
        compute = self.compute_stream()
        if stream is None or compute is None:
            yield compute
            return
        stream.wait_event(compute.record_event())
        if after is not None:
            stream.wait_event(after)
        with stream:
            yield stream

    def _copied(self, start: Mark, stop: Mark, nbytes: int) -> torch.Event | None:
        self._counters.copied_bytes += nbytes
        self._timeline.add("copy_ms", start, stop, self._counters)
        if self._leaving is None:  # compute waits for every copy on its own stream
            self._timeline.add("stall_ms", start, stop, self._counters)
        return stop if isinstance(stop, torch.Event) else None


def _bytes_of(storage: torch.UntypedStorage, region: Region) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=region.device)
    return empty.set_(storage, region.start, (region.nbytes,), (1,))
