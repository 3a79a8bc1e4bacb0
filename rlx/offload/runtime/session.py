"""The session: the state that all layer calls of one model share, from the order of the calls to the counters."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from rlx.offload.runtime.options import OffloadOptions
from rlx.offload.storage.arena import host_arena
from rlx.offload.storage.copy_streams import CopyStreams
from rlx.offload.storage.offloader import OffloadedRange, Offloader
from rlx.offload.storage.regions import region_of
from rlx.offload.storage.spill_file import extent_file
from rlx.offload.storage.stats import Counters, LayerStats, OffloadStats, Timeline
from rlx.offload.storage.tiers import DiskTier, HostTier, StagingBuffers, Tier

logger = logging.getLogger("rlx.offload")

# For how many layer calls a copy to the host may take, until compute waits for it. A layer's inputs are offloaded at its
# beginning; with `save="all"` the last tensors are offloaded at its end and need the next layer's time.
_LAG = {"boundary": 1, "attention": 1, "all": 2, "auto": 2}


class Layer:
    """A layer of the model: its position among the layers, its name and its counters."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.counters = Counters()


class LayerCall:
    """One forward call of a layer, for as long as a graph needs it.

    The packed objects that autograd holds own the call. So a dropped graph, a branch without a loss or an exception frees
    everything. A call owns no tensor that autograd saves, and refers to the call before it weakly.
    """

    def __init__(self, session: OffloadSession, layer: Layer) -> None:
        self.session = session
        self.layer = layer
        self.offloaded: list[weakref.ref[OffloadedRange]] = []
        self._is_prefetched = False
        self.number, self.previous = session.begin_call(self)

    def fetch(self) -> None:
        """Begin to fetch all that this call has offloaded."""
        for reference in self.offloaded:
            offloaded = reference()
            if offloaded is not None:
                offloaded.fetch()

    def begin_backward(self) -> bool:
        """Note that backward is in this call; True if it has just entered it.

        The call that it has left releases its device copies. With a retained graph nobody else would.
        """
        before = self.session.enter_backward(self)
        if before is self:
            return False
        self._is_prefetched = False
        if before is not None:
            before.evict(needed_by=self)
        return True

    def evict(self, needed_by: LayerCall | None = None) -> None:
        """Release the device copies of all that this call has offloaded, except what `needed_by` has offloaded too."""
        if not self.offloaded:
            return
        still_used = needed_by.offloaded if needed_by is not None else []
        for reference in self.offloaded:
            offloaded = reference()
            if offloaded is not None and reference not in still_used:
                offloaded.evict()

    def prefetch(self, layers: int) -> None:
        """Begin to fetch all that the `layers` calls before this one have offloaded, once in a backward pass."""
        if self._is_prefetched:
            return
        self._is_prefetched = True
        call: LayerCall | None = self
        for _ in range(layers):
            call = call.previous() if call is not None and call.previous is not None else None
            if call is None:
                return
            call.fetch()


class _OfThread(threading.local):
    """The layer calls that a thread entered last."""

    last: weakref.ref[LayerCall] | None = None
    in_backward: weakref.ref[LayerCall] | None = None


class OffloadSession:
    """The state of one handle. It knows no modules.

    Args:
        options: the user's choice.
        save: `"boundary"`, `"attention"`, `"all"` or `"auto"`, as resolved from it.

    Raises:
        DiskError: if the disk tier is asked for and its directory cannot be used.
    """

    def __init__(self, options: OffloadOptions, save: str) -> None:
        self.options = options
        self.save = save
        self.timeline = Timeline()
        self.counters = Counters()
        self.layers: list[Layer] = []
        self._offloaders: dict[torch.device, Offloader] = {}
        self._file = extent_file(options.directory) if options.directory is not None and options.uses_disk else None
        self._tiers: dict[bool, tuple[Tier, ...]] = {}
        self._numbers = itertools.count()
        self._thread = _OfThread()
        self._lock = threading.Lock()
        self._has_warned_full = False

    def begin_call(self, call: LayerCall) -> tuple[int, weakref.ref[LayerCall] | None]:
        """Number a layer call and link it to the one before it on this thread, unless a new forward has begun."""
        number = next(self._numbers)
        last = self._thread.last
        before = last() if last is not None else None
        self._thread.last = weakref.ref(call)
        for offloader in tuple(self._offloaders.values()):
            if offloader.in_flight:
                offloader.release_older(number, _LAG[self.save])
        return number, last if before is not None and before.layer.index <= call.layer.index else None

    def enter_backward(self, call: LayerCall) -> LayerCall | None:
        """Note that backward on this thread has entered a call; return the call that it was in before."""
        last = self._thread.in_backward
        before = last() if last is not None else None
        if before is not call:
            self._thread.in_backward = weakref.ref(call)
            if self.save == "auto" and (before is None or before.number < call.number):
                # A backward begins. It does not need yet what is still being copied, and the plan counts that memory as free.
                for offloader in tuple(self._offloaders.values()):
                    offloader.release_older(call.number, 1)
        return before

    def offload(self, tensor: Tensor, call: LayerCall) -> OffloadedRange | None:
        """Send the bytes of a tensor off for a call, once for all that look at them; None where the host has no room.

        Which tensors may leave is the caller's decision.
        """
        region = region_of(tensor)
        offloader = self._offloaders.get(region.device) or self._offloader(region.device)
        reference = offloader.table.get(region)
        offloaded = reference() if reference is not None else None
        if offloaded is None or not offloaded.has_storage_of(tensor):
            offloaded = offloader.offload(tensor, region, call.number)
            if offloaded is None:
                self._warn_full(region.nbytes)
                return None
            call.layer.counters.offloaded_bytes += offloaded.nbytes
            if self.options.max_inflight_bytes is not None:
                offloader.limit_in_flight(self.options.max_inflight_bytes)
        call.offloaded.append(weakref.ref(offloaded))
        return offloaded

    def stats(self, per_layer: bool) -> OffloadStats:
        """Return the figures since the session began. Device times of queued work are not in them yet."""
        self.timeline.harvest()
        tiers = [tier for tiers in tuple(self._tiers.values()) for tier in tiers]
        disks = [tier for tier in tiers if isinstance(tier, DiskTier)]
        total = self.counters
        layers: Mapping[str, LayerStats] = {}
        if per_layer:
            layers = {
                layer.name: LayerStats(c.offloaded_bytes, c.kept_bytes, c.recomputed_ms)
                for layer in self.layers
                for c in [layer.counters]
            }
        return OffloadStats(
            offloaded_bytes=total.offloaded_bytes,
            held_bytes=sum(tier.held_bytes for tier in tiers),
            reserved_bytes=sum(host_arena(pinned).reserved_bytes for pinned in tuple(self._tiers)),
            kept_bytes=sum(layer.counters.kept_bytes for layer in self.layers),
            recomputed_ms=total.recomputed_ms,
            copied_bytes=total.copied_bytes,
            copy_ms=total.copy_ms,
            stall_ms=total.stall_ms,
            disk_bytes=sum(disk.moved_bytes for disk in disks),
            disk_ms=sum(disk.busy_ms for disk in disks),
            disk_reserved_bytes=self._file.nbytes if self._file is not None else 0,
            layers=layers,
        )

    def _offloader(self, device: torch.device) -> Offloader:
        offloader = self._offloaders.get(device)
        if offloader is None:
            with self._lock:
                pinned = self.options.pin_memory and device.type != "cpu"
                if pinned not in self._tiers:
                    self._tiers[pinned] = self._make_tiers(pinned)
                copy_streams = CopyStreams(device, self.options.use_streams, self.counters, self.timeline)
                offloader = self._offloaders.setdefault(
                    device, Offloader(copy_streams, self._tiers[pinned], self.counters)
                )
        return offloader

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
            f"{staging.nbytes} are buffers for the disk; what does not fit goes to {options.directory}"
        )
        return (HostTier(account), DiskTier(self._file, staging, warning))

    def _warn_full(self, nbytes: int) -> None:
        if self._has_warned_full:
            return
        self._has_warned_full = True
        held = sum(tier.held_bytes for tiers in self._tiers.values() for tier in tiers)
        logger.warning(
            "activation offloading: host memory is full: %d bytes held, %d more wanted, max_host_bytes is %s; "
            "what does not fit stays on the device. Raise max_host_bytes if it is set; otherwise the machine or the arena has no more",
            held,
            nbytes,
            self.options.max_host_bytes,
        )
