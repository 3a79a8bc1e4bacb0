"""Timed copies between one device and host memory, on streams of their own.

Without an accelerator the copies are synchronous, and nothing else differs.
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
    """Counts tasks that other threads run; `wait` returns when all are done and raises the first failure."""

    def __init__(self) -> None:
        self._left = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def expect(self) -> None:
        """Add a task to wait for. It will call `done`."""
        with self._changed:
            self._left += 1

    def done(self, failure: BaseException | None = None) -> None:
        """Note that a task has ended."""
        with self._changed:
            self._left -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all tasks are done; raise the error of the first that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)
            if self._failure is not None:
                raise copy.copy(self._failure)  # a raised error gets a traceback, which would keep frames alive


class FetchBuffer:
    """A contiguous device tensor that offloaded bytes are fetched into. Its memory belongs to the stream `home`.

    The `OffloadedRange` holds it and so does each thread that copies into it. When the last of them drops it, `home` is made to
    wait for the copies. Only then may the allocator reuse the memory.

    Args:
        shape, dtype, device: of the tensor.
        home: the current stream of the device; None without an accelerator.
    """

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
        """Allocate the tensor, before copies are issued. Call it on the thread whose current stream is `home`."""
        self.tensor = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        if self.home is not None:
            self.allocated = self.home.record_event()

    def __del__(self) -> None:
        if self.home is not None:
            for event in self.copies:
                self.home.wait_event(event)


class CopyStreams:
    """Copies of one device.

    Args:
        device: one end of the copies; for the CPU they are synchronous.
        use_streams: copy on two streams of its own, one for each direction, instead of on the compute stream.
        counters, timeline: get bytes and times of copies and stalls.
    """

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
        """Return the current stream of the device; None without an accelerator."""
        return None if self.on_host else torch.accelerator.current_stream(self.device)

    def device_is_current(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the device is current. A new thread would use device 0 otherwise."""
        return contextlib.nullcontext() if self.on_host else torch.accelerator.device_index(self.device.index)

    def copy_to_host(self, source: Tensor, block: Block) -> torch.Event | None:
        """Copy a contiguous tensor to the host, after the work that compute has queued; return the event that ends the copy."""
        if self.on_host:
            self._copy_now(source, block, to_host=True, is_waited_for=True)
            return None
        compute = torch.accelerator.current_stream(self.device)
        if self._to_host is not None:
            self._to_host.wait_event(compute.record_event())
        return self._copy(self._to_host or compute, source, block, to_host=True)

    def copy_to_device(self, block: Block, fetch_buffer: FetchBuffer, after: torch.Event | None) -> torch.Event | None:
        """Allocate a fetch buffer and copy a block into it; return the event that ends the copy.

        The device first waits for the event `after`, before which the block is still written.
        """
        whole = block.whole(fetch_buffer.shape, fetch_buffer.dtype) if self.on_host else None
        if whole is not None:  # one call instead of two halves the time for a small tensor
            start = time.perf_counter()
            fetch_buffer.tensor = whole.clone()
            self._count(start, whole.nbytes, is_waited_for=True)
            return None
        fetch_buffer.allocate()
        return self.copy_into(fetch_buffer.tensor, block, fetch_buffer, after)

    def copy_into(
        self, target: Tensor, block: Block, fetch_buffer: FetchBuffer, after: torch.Event | None = None
    ) -> torch.Event | None:
        """Copy a block into `target`, a part of an allocated fetch buffer; callable on any thread."""
        if self.on_host:
            self._copy_now(target, block, to_host=False, is_waited_for=fetch_buffer.issued is None)
            return None
        stream = self._to_device or fetch_buffer.home
        assert stream is not None
        for event in (fetch_buffer.allocated, after):
            if event is not None:
                stream.wait_event(event)  # needless on one stream, but layers may compute on several
        copied = self._copy(stream, target, block, to_host=False)
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
        """Measure how long a compute stream is idle because it, or the host, waits inside the `with` block."""
        start = mark(stream)
        yield
        self._timeline.add("stall_ms", start, mark(stream), self._counters)

    def _copy(self, stream: torch.Stream, tensor: Tensor, block: Block, to_host: bool) -> torch.Event:
        start = mark(stream)
        with stream:
            for on_device, on_host in block.pairs(tensor):
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)
        stop = mark(stream)
        assert isinstance(stop, torch.Event)
        with self._lock:
            self._counters.copied_bytes += tensor.nbytes
        self._timeline.add("copy_ms", start, stop, self._counters)
        if self._to_host is None:  # compute waits for its own stream
            self._timeline.add("stall_ms", start, stop, self._counters)
        return stop

    def _copy_now(self, tensor: Tensor, block: Block, to_host: bool, is_waited_for: bool) -> None:
        """Copy without an accelerator: synchronously."""
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
