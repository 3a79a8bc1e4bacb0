"""The figures that `stats()` returns: bytes and times."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

TIMED_BYTES = 1 << 24  # copies of fewer bytes do not show a rate


@dataclass(frozen=True)
class LayerStats:
    """Figures of one layer since the engine was enabled."""

    offloaded_bytes: int = 0
    kept_bytes: int = 0
    recomputed_ms: float = 0.0


@dataclass(frozen=True)
class OffloadStats:
    """Figures of the engine since it was switched on; `since` returns those of a step."""

    offloaded_bytes: int = 0  # copied off the device, each range of bytes once
    held_bytes: int = 0  # off the device now, for graphs that are alive
    reserved_bytes: int = 0  # host memory that the arena has reserved from the system, for all its users
    # Saved tensors and layer inputs kept on the device, counted each time one is saved; without parameters, buffers and, with
    # `save="all"`, arguments that want no gradient.
    kept_bytes: int = 0
    recomputed_ms: float = 0.0  # device time of recomputing layers
    copied_bytes: int = 0  # in both directions
    copy_ms: float = 0.0  # device time of these copies
    stall_ms: float = 0.0  # device time in which compute waited for copies or for the disk
    disk_bytes: int = 0  # written to disk and read from it
    disk_ms: float = 0.0  # time in which at least one thread was writing or reading
    disk_reserved_bytes: int = 0  # size of the file on disk, for all its users
    layers: Mapping[str, LayerStats] = field(default_factory=dict)  # figures of each layer, if asked for

    @property
    def copy_gb_per_s(self) -> float:
        return self.copied_bytes / self.copy_ms / 1e6 if self.copy_ms else 0.0

    @property
    def disk_gb_per_s(self) -> float:
        return self.disk_bytes / self.disk_ms / 1e6 if self.disk_ms else 0.0

    @property
    def overlap(self) -> float:
        moving_ms = self.copy_ms + self.disk_ms
        return max(0.0, 1.0 - self.stall_ms / moving_ms) if moving_ms else 0.0

    def __str__(self) -> str:
        lines = [
            f"offloaded {readable(self.offloaded_bytes)}, kept on the device {readable(self.kept_bytes)}, "
            f"recomputed {self.recomputed_ms:.1f} ms",
            f"off the device now {readable(self.held_bytes)}, host memory reserved {readable(self.reserved_bytes)}",
        ]
        if self.copied_bytes:
            lines.append(
                f"copied {readable(self.copied_bytes)} in {self.copy_ms:.1f} ms ({self.copy_gb_per_s:.1f} GB/s), "
                f"compute waited {self.stall_ms:.1f} ms, overlap {self.overlap:.1%}"
            )
        if self.disk_reserved_bytes or self.disk_bytes:
            lines.append(
                f"disk: {readable(self.disk_bytes)} moved in {self.disk_ms:.1f} ms ({self.disk_gb_per_s:.1f} GB/s), "
                f"file of {readable(self.disk_reserved_bytes)}"
            )
        for name, layer in self.layers.items():
            lines.append(
                f"{name}: offloaded {readable(layer.offloaded_bytes)}, kept {readable(layer.kept_bytes)}, "
                f"recomputed {layer.recomputed_ms:.1f} ms"
            )
        return "\n".join(lines)

    def since(self, earlier: OffloadStats) -> OffloadStats:
        """Return the figures since `earlier`: differences of counts and times; held and reserved bytes as they are now."""
        levels = ("held_bytes", "reserved_bytes", "disk_reserved_bytes", "layers")
        layers = {
            name: LayerStats(**_differences(now, earlier.layers.get(name, LayerStats())))
            for name, now in self.layers.items()
        }
        return replace(self, layers=layers, **_differences(self, earlier, without=levels))


def _differences(now: Any, earlier: Any, without: Collection[str] = ()) -> dict[str, Any]:
    names = [field.name for field in fields(now) if field.name not in without]
    return {name: getattr(now, name) - getattr(earlier, name) for name in names}


def readable(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


def measured_rate(nbytes: int, ms: float) -> float | None:
    return nbytes / ms * 1e3 if nbytes >= TIMED_BYTES and ms else None
