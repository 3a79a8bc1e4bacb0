"""What the engine counts and how long it took."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch


@dataclass(frozen=True)
class LayerStats:
    """What one layer has moved and recomputed since the engine was switched on."""

    offloaded_bytes: int = 0
    kept_bytes: int = 0
    recomputed_ms: float = 0.0


@dataclass(frozen=True)
class OffloadStats:
    """What the engine has done since it was switched on; `since` gives the figures of a step.

    Args:
        offloaded_bytes: copied off the device, each range of bytes once.
        held_bytes: off the device now, for graphs that are alive.
        reserved_bytes: host memory the arena has taken from the system, for all its users.
        kept_bytes: saved tensors and layer inputs that stayed on the device, each time one is saved; parameters and
            buffers are not counted.
        recomputed_ms: device time of recomputing layers.
        copied_bytes: copied in both directions.
        copy_ms: device time of these copies.
        stall_ms: device time that compute waited for copies or for the disk.
        disk_bytes: written to disk and read from it.
        disk_ms: time in which at least one thread was writing or reading.
        disk_reserved_bytes: size of the file on disk, for all its users.
        layers: per layer, when asked for.
    """

    offloaded_bytes: int = 0
    held_bytes: int = 0
    reserved_bytes: int = 0
    kept_bytes: int = 0
    recomputed_ms: float = 0.0
    copied_bytes: int = 0
    copy_ms: float = 0.0
    stall_ms: float = 0.0
    disk_bytes: int = 0
    disk_ms: float = 0.0
    disk_reserved_bytes: int = 0
    layers: Mapping[str, LayerStats] = field(default_factory=dict)

    @property
    def copy_gb_per_s(self) -> float:
        """Mean rate of the copies [10^9 bytes per second]."""
        return self.copied_bytes / self.copy_ms / 1e6 if self.copy_ms else 0.0

    @property
    def disk_gb_per_s(self) -> float:
        """Mean rate of the disk while it was used [10^9 bytes per second]."""
        return self.disk_bytes / self.disk_ms / 1e6 if self.disk_ms else 0.0

    @property
    def overlap(self) -> float:
        """Share of the time of copies and disk that compute did not wait for."""
        moving_ms = self.copy_ms + self.disk_ms
        return max(0.0, 1.0 - self.stall_ms / moving_ms) if moving_ms else 1.0

    def since(self, earlier: OffloadStats) -> OffloadStats:
        """The figures since an earlier call: counts and times are differences, held and reserved bytes are as now."""
        levels = ("held_bytes", "reserved_bytes", "disk_reserved_bytes", "layers")
        names = [name for name in (f.name for f in fields(self)) if name not in levels]
        changed = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        layers = {
            name: LayerStats(*(getattr(now, f.name) - getattr(before, f.name) for f in fields(now)))
            for name, now in self.layers.items()
            for before in [earlier.layers.get(name, LayerStats())]
        }
        return replace(self, layers=layers, **changed)


class Counters:
    """Running sums, of the engine or of one layer."""

    def __init__(self) -> None:
        self.offloaded_bytes = 0
        self.kept_bytes = 0
        self.copied_bytes = 0
        self.recomputed_ms = 0.0
        self.copy_ms = 0.0
        self.stall_ms = 0.0


Mark = float | torch.Event


def mark(stream: torch.Stream | None) -> Mark:
    """A point in time: on a device's stream, or now where there is none [ms]."""
    if stream is None:
        return time.perf_counter() * 1e3
    # Blocking: a thread that waits for it sleeps instead of keeping a core busy.
    event = torch.Event(stream.device, enable_timing=True, blocking=True)
    event.record(stream)
    return event


class Timeline:
    """Turns pairs of marks into milliseconds once the device has passed them, without waiting for it."""

    def __init__(self) -> None:
        self._pending: deque[tuple[tuple[Counters, ...], str, torch.Event, torch.Event]] = deque()
        self._lock = threading.Lock()

    def add(self, name: str, start: Mark, stop: Mark, *counters: Counters) -> None:
        """Add the time between two marks to the field `name` of some counters."""
        if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
            self._pending.append((counters, name, start, stop))
            if len(self._pending) > 256:
                self.harvest()
        elif isinstance(start, float) and isinstance(stop, float):
            with self._lock:
                for counter in counters:
                    setattr(counter, name, getattr(counter, name) + stop - start)

    def harvest(self) -> None:
        """Sum up the pairs that the device has passed."""
        with self._lock:
            while self._pending and self._pending[0][3].query():
                counters, name, start, stop = self._pending.popleft()
                ms = start.elapsed_time(stop)
                for counter in counters:
                    setattr(counter, name, getattr(counter, name) + ms)
