"""The session: the state that all layer calls of one model share, from the order of the calls to the counters."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from rlx.offload.runtime.options import SAVE_MODES, OffloadOptions
from rlx.offload.storage.arena import host_arena
from rlx.offload.storage.disk import DiskTier, StagingBuffers, extent_file
from rlx.offload.storage.offloader import CopyStreams, Counters, HostTier, OffloadedRange, Offloader, Tier, Timeline
from rlx.offload.storage.stats import LayerStats, OffloadStats
from rlx.offload.storage.tensor_bytes import region_of, span_length

logger = logging.getLogger("rlx.offload")


class Layer:
    """A layer of the model: its position among the layers, its name and its counters."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.counters = Counters()


class LayerCall:
    """One forward call of a layer. The packed objects that autograd holds own it, and it owns no tensor that autograd saves."""

    def __init__(self, session: OffloadSession, layer: Layer) -> None:
        self.session = session
        self.layer = layer
        self.offloaded: list[weakref.ref[OffloadedRange]] = []
        self._is_prefetched = False
        self.number, self.previous = session.begin_call(self)

    def fetch(self) -> None:
        for offloaded in filter(None, (reference() for reference in self.offloaded)):
            offloaded.fetch()

    def begin_backward(self) -> bool:
        """Note that backward is in this call; True if it has just entered it, and left another, whose copies are evicted."""
        before = self.session.enter_backward(self)
        if before is self:
            return False
        self._is_prefetched = False
        if before is not None:
            before.evict(needed_by=self)
        return True

    def evict(self, needed_by: LayerCall | None = None) -> None:
        """Release the device copies of all that this call has offloaded, except what `needed_by` has offloaded too."""
        still_used = needed_by.offloaded if needed_by is not None else []
        for reference in self.offloaded:
            offloaded = reference()
            if offloaded is not None and reference not in still_used:
                offloaded.evict()

    def prefetch(self) -> None:
        """Begin to fetch all that the calls before this one have offloaded, once in a backward pass."""
        if self._is_prefetched:
            return
        self._is_prefetched = True
        layers = self.session.options.prefetch_layers
        call = self.previous()
        for _ in range(1 if layers is None else layers):
            if call is None:
                return
            call.fetch()
            call = call.previous()


def _no_call() -> None:
    """The call before the first one."""


class _OfThread(threading.local):
    """The layer calls that a thread entered last, in forward and in backward; weak references."""

    last: Callable[[], LayerCall | None] = staticmethod(_no_call)
    in_backward: Callable[[], LayerCall | None] = staticmethod(_no_call)


class OffloadSession:
    """The state of one handle. It knows no modules."""

    def __init__(self, options: OffloadOptions, save: str) -> None:
        self.options = options
        self.save = save
        self.is_disabled = False  # transformers' checkpointing of the layers may be on again
        self.min_bytes = options.min_bytes or 1
        self.largest_small = 0  # of the tensors below min_bytes
        self._copying_calls = SAVE_MODES[save].copying_calls
        self.timeline = Timeline()
        self.counters = Counters()
        self.layers: list[Layer] = []
        self._offloaders: dict[torch.device, Offloader] = {}
        self._file = extent_file(options.directory) if options.directory is not None and options.uses_disk else None
        self._tiers: dict[bool, tuple[Tier, ...]] = {}
        self._numbers = itertools.count()
        self._thread = _OfThread()
        self._lock = threading.Lock()
        self._noted: set[str] = set()

    def begin_call(self, call: LayerCall) -> tuple[int, Callable[[], LayerCall | None]]:
        """Return a layer call's number, and a weak reference to the call before it on this thread in the same forward."""
        number, last = next(self._numbers), self._thread.last
        before = last()
        self._thread.last = weakref.ref(call)
        for offloader in tuple(self._offloaders.values()):
            if offloader.in_flight:
                offloader.release_older(number, self._copying_calls)
        return number, last if before is not None and before.layer.index <= call.layer.index else _no_call

    def enter_backward(self, call: LayerCall) -> LayerCall | None:
        """Note that backward on this thread has entered a call; return the call that it was in before."""
        before = self._thread.in_backward()
        if before is not call:
            self._thread.in_backward = weakref.ref(call)
            if self.save == "auto" and (before is None or before.number < call.number):
                # A backward begins. The plan counts the memory that is still being copied as free.
                for offloader in tuple(self._offloaders.values()):
                    offloader.release_older(call.number, 1)
        return before

    def offload(self, tensor: Tensor, call: LayerCall) -> OffloadedRange | None:
        """Offload the bytes of a tensor for a call, once for all views; None if the tensor is small or the host has no room."""
        if (nbytes := span_length(tensor)) < self.min_bytes:
            self.largest_small = max(self.largest_small, nbytes)
            return None
        region = region_of(tensor)
        offloader = self._offloaders.get(region.device) or self._new_offloader(region.device)
        reference = offloader.table.get(region)
        offloaded = reference() if reference is not None else None
        if offloaded is None or not offloaded.has_storage_of(tensor):
            offloaded = offloader.offload(tensor, region, call.number)
            if offloaded is None:
                if self.is_first("host memory is full"):
                    self._warn_full(region.nbytes)
                return None
            call.layer.counters.offloaded_bytes += offloaded.nbytes
            if self.options.max_inflight_bytes is not None:
                offloader.limit_in_flight(self.options.max_inflight_bytes)
        call.offloaded.append(weakref.ref(offloaded))
        return offloaded

    def why_idle(self) -> str | None:
        """Return in words why nothing has left the device so far; None if something has, or a log line has said why."""
        if any(layer.counters.offloaded_bytes for layer in self.layers):
            return None
        if self.largest_small:
            return (
                f"the largest tensor that its layers save has {self.largest_small:,} bytes, below options.min_bytes of "
                f"{self.min_bytes:,}. Later passes with more tokens may differ; for a trial with a small model set "
                "OffloadOptions(min_bytes=0)"
            )
        return None if "host memory is full" in self._noted else "its layers got no tensor that requires a gradient"

    def is_first(self, topic: str) -> bool:
        is_first = topic not in self._noted
        self._noted.add(topic)
        return is_first

    def stats(self, per_layer: bool) -> OffloadStats:
        self.timeline.harvest()
        tiers = self._all_tiers()
        disks = [tier for tier in tiers if isinstance(tier, DiskTier)]
        layers = {layer.name: layer.counters for layer in self.layers}
        sums = vars(self.counters) | {"kept_bytes": sum(counters.kept_bytes for counters in layers.values())}
        return OffloadStats(
            **sums,
            held_bytes=sum(tier.held_bytes for tier in tiers),
            reserved_bytes=sum(host_arena(pinned).reserved_bytes for pinned in tuple(self._tiers)),
            disk_bytes=sum(disk.moved_bytes for disk in disks),
            disk_ms=sum(disk.busy_ms for disk in disks),
            disk_reserved_bytes=self._file.nbytes if self._file is not None else 0,
            layers={
                name: LayerStats(counters.offloaded_bytes, counters.kept_bytes, counters.recomputed_ms)
                for name, counters in layers.items()
                if per_layer
            },
        )

    def _all_tiers(self) -> list[Tier]:
        return [tier for tiers in tuple(self._tiers.values()) for tier in tiers]

    def _new_offloader(self, device: torch.device) -> Offloader:
        with self._lock:
            pinned = self.options.pin_memory and device.type != "cpu"
            if pinned not in self._tiers:
                self._tiers[pinned] = self._make_tiers(pinned)
            copy_streams = CopyStreams(device, self.options.use_streams, self.counters, self.timeline)
            # Another thread may have been faster.
            return self._offloaders.setdefault(device, Offloader(copy_streams, self._tiers[pinned], self.counters))

    def _make_tiers(self, pinned: bool) -> tuple[Tier, ...]:
        options, arena = self.options, host_arena(pinned)
        if self._file is None:
            return (HostTier(arena.account(options.max_host_bytes, "activations")),)
        staging = StagingBuffers(arena, options.staging_chunk_bytes)
        if options.tier == "disk":
            return (DiskTier(self._file, staging, warning=None),)
        assert options.max_host_bytes is not None
        account = arena.account(options.max_host_bytes - staging.nbytes, "activations")
        warning = (
            f"activation offloading: host memory is full: max_host_bytes is {options.max_host_bytes}, of which "
            f"{staging.nbytes} are buffers for the disk; the rest goes to {options.directory}"
        )
        return (HostTier(account), DiskTier(self._file, staging, warning))

    def _warn_full(self, nbytes: int) -> None:
        held = sum(tier.held_bytes for tier in self._all_tiers())
        logger.warning(
            f"activation offloading: host memory is full: {held} bytes held, {nbytes} more wanted, max_host_bytes is "
            f"{self.options.max_host_bytes}; the rest stays on the device. Raise max_host_bytes if it is set; "
            "otherwise the machine or the arena has no more"
        )
