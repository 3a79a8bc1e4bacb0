"""Copies between one device and host memory, on streams of their own, and what they cost.

Where there is no accelerator the copies are synchronous; everything else is the same.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from rlx.offload.storage.arena import Block
from rlx.offload.storage.stats import Counters, Timeline, mark


class PendingTasks:
    """Waits until tasks on other threads are done, and passes on the first failure."""

    def __init__(self) -> None:
        self._left = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def expect(self, tasks: int) -> None:
        """Announce tasks, each of which will call `done`."""
        with self._changed:
            self._left += tasks

    def done(self, failure: BaseException | None = None) -> None:
        """Note that a task has ended."""
        with self._changed:
            self._left -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when all announced tasks are done; raises what the first of them failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)
            if self._failure is not None:
                raise copy.copy(self._failure)  # the traceback of a raised one holds its raiser's frames


class FetchBuffer:
    """A buffer on the device that bytes arrive in. Belongs to the stream that was current when it was made.

    Held by whoever brings bytes back and, while it copies into it, by the thread that does. The last of them to let go
    makes the buffer's stream wait for the copies: only then may the memory be handed on.

    Args:
        shape, dtype: of the buffer; it is contiguous.
        device: where it is.
        home: the current stream of the device; None without an accelerator.
    """

    buffer: Tensor

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, home: torch.Stream | None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.home = home
        self.copies: list[torch.Event] = []
        self.issued: PendingTasks | None = None  # of the copies that other threads issue
        self.allocated: torch.Event | None = None
        self._device = device

    def allocate(self) -> None:
        """Make the buffer, before copies into it are issued; on the thread whose current stream it belongs to."""
        self.buffer = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        if self.home is not None:
            self.allocated = self.home.record_event()

    def __del__(self) -> None:
        if self.home is not None:
            for event in self.copies:
                self.home.wait_event(event)


class CopyStreams:
    """Copies of one device.

    Args:
        device: whose bytes move; on the CPU copies are synchronous.
        use_streams: copy on two streams of its own, one each way, instead of on the compute stream.
        counters: where copies and stalls are summed up.
        timeline: how their time is measured.
    """

    def __init__(self, device: torch.device, use_streams: bool, counters: Counters, timeline: Timeline) -> None:
        self.device = device
        self.on_host = device.type == "cpu"
        self._leaving = self._returning = None
        if use_streams and not self.on_host:
            self._leaving, self._returning = torch.Stream(device), torch.Stream(device)
        self._counters = counters
        self._timeline = timeline
        self._lock = threading.Lock()

    def compute_stream(self) -> torch.Stream | None:
        """The stream current at this moment; None without an accelerator."""
        return None if self.on_host else torch.accelerator.current_stream(self.device)

    def device_is_current(self) -> contextlib.AbstractContextManager[object]:
        """What a thread of its own enters before it touches the device: it begins on the first one, and would use that."""
        return contextlib.nullcontext() if self.on_host else torch.accelerator.device_index(self.device.index)

    def copy_to_host(self, source: Tensor, block: Block) -> torch.Event | None:
        """Copy a contiguous tensor to the host, behind what compute has queued; returns the event that ends the copy."""
        if self.on_host:
            self._copy_now(source, block, to_host=True, is_waited_for=True)
            return None
        compute = self.compute_stream()
        stream = self._leaving or compute
        if self._leaving is not None and compute is not None:
            self._leaving.wait_event(compute.record_event())
        return self._copy(stream, source, block, to_host=True, is_waited_for=self._leaving is None)

    def copy_to_device(self, block: Block, fetch_buffer: FetchBuffer, after: torch.Event | None) -> torch.Event | None:
        """Make the buffer of an fetch_buffer, and fill it from a block.

        Args:
            block: host memory.
            fetch_buffer: what has no buffer yet.
            after: an event to wait for on the device before host memory is read.
        """
        whole = block.whole(fetch_buffer.shape, fetch_buffer.dtype) if self.on_host else None
        if whole is not None:  # one call instead of two: half the time for a small tensor
            start = time.perf_counter()
            fetch_buffer.buffer = whole.clone()
            self._count(start, whole.nbytes, is_waited_for=True)
            return None
        fetch_buffer.allocate()
        return self.copy_into(fetch_buffer.buffer, block, fetch_buffer, after, is_ahead=False)

    def copy_into(
        self, target: Tensor, block: Block, fetch_buffer: FetchBuffer, after: torch.Event | None, is_ahead: bool
    ) -> torch.Event | None:
        """Copy a block into some or all of the buffer of an fetch_buffer; on any thread.

        Args:
            target: that part of the buffer.
            block, fetch_buffer, after: see `back`.
            is_ahead: whether a thread of its own issues this, so that nobody waits for it without an accelerator.
        """
        if self.on_host:
            self._copy_now(target, block, to_host=False, is_waited_for=not is_ahead)
            return None
        stream = self._returning or fetch_buffer.home
        for event in (fetch_buffer.allocated, after):
            if stream is not None and event is not None:
                stream.wait_event(event)  # on one stream for nothing, but layers may compute on several
        copied = self._copy(stream, target, block, to_host=False, is_waited_for=self._returning is None)
        if copied is not None:
            fetch_buffer.copies.append(copied)
        return copied

    def wait_for(self, fetch_buffer: FetchBuffer) -> None:
        """Make the current stream wait for the bytes of an fetch_buffer, and the host until their copies are issued."""
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
            fetch_buffer.buffer.record_stream(stream)  # fetched ahead by a layer that computes on another stream

    @contextlib.contextmanager
    def stalling(self, stream: torch.Stream | None) -> Iterator[None]:
        """Measure for how long a compute stream has nothing to do because it, or the host, waits inside the block."""
        start = mark(stream)
        yield
        self._timeline.add("stall_ms", start, mark(stream), self._counters)

    def _copy(
        self,
        stream: torch.Stream | None,
        tensor: Tensor,
        block: Block,
        to_host: bool,
        is_waited_for: bool,
    ) -> torch.Event | None:
        start = mark(stream)
        with stream if stream is not None else contextlib.nullcontext():
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

    def _copy_now(self, tensor: Tensor, block: Block, to_host: bool, is_waited_for: bool) -> None:
        """Without an accelerator there is no stream, and copies are done when they return."""
        start = time.perf_counter()
        for on_device, on_host in block.pairs(tensor):
            if to_host:
                on_host.copy_(on_device)
            else:
                on_device.copy_(on_host)
        self._count(start, tensor.nbytes, is_waited_for)

    def _count(self, start: float, nbytes: int, is_waited_for: bool) -> None:
        counters, ms = self._counters, (time.perf_counter() - start) * 1e3
        with self._lock:
            counters.copied_bytes += nbytes
            counters.copy_ms += ms
            if is_waited_for:
                counters.stall_ms += ms
