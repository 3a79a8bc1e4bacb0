"""What a benchmark has found out; everything in it goes to the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx.offload.storage.stats import OffloadStats


@dataclass(frozen=True)
class MemoryCurve:
    """Device memory over one step: before each point in time the largest since the one before.

    Args:
        seconds: since the step began.
        used_bytes: above weights and gradients.
    """

    seconds: Sequence[float]
    used_bytes: Sequence[int]


@dataclass(frozen=True)
class Row:
    """One mode in one case. What is None was not measured; `note` says why.

    Args:
        step_s: time of each step, of the slowest process; scaled where `layers` is less than the case's.
        peak_bytes: device memory above weights and gradients; None where scaled, and on the CPU.
        held_bytes: off the device at the end of forward.
        stall_share: of the step's time.
        disk_gb_per_s: None where nothing went to disk.
        overlap: share of the time of copies and disk that compute did not wait for.
        predicted_s, predicted_peak_bytes: what the plan of auto expects of a step.
    """

    mode: str
    note: str | None = None
    layers: int = 0
    step_s: Sequence[float] = ()
    median_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    ratio_to_plain: float | None = None
    ratio_to_checkpointing: float | None = None
    peak_bytes: int | None = None
    offloaded_bytes_per_step: int | None = None
    held_bytes: int | None = None
    copy_gb_per_s: float | None = None
    disk_gb_per_s: float | None = None
    stall_ms_per_step: float | None = None
    stall_share: float | None = None
    overlap: float | None = None
    recomputed_ms_per_step: float | None = None
    predicted_s: float | None = None
    predicted_peak_bytes: int | None = None
    curve: MemoryCurve | None = None


@dataclass(frozen=True)
class HostMemoryUse:
    """The arena's figures over all modes of a case, and the size of the file on disk.

    Args:
        reserved_bytes: host memory taken from the system.
        disk_reserved_bytes: size of the file.
        largest_held_bytes: the most that a mode held at the end of its forward, in memory and on disk.
        reserved_to_held: quotient of both reserved and held; None where nothing was held.
        allocations_after_warm_up: how often memory was taken from the system while steps were measured.
    """

    reserved_bytes: int
    disk_reserved_bytes: int
    largest_held_bytes: int
    reserved_to_held: float | None
    allocations_after_warm_up: int


@dataclass(frozen=True)
class CaseResult:
    """All modes of one case."""

    tokens: int
    layers: int
    rows: Sequence[Row]
    host: HostMemoryUse
    seconds: float = 0.0


def engine_figures(stats: OffloadStats, steps: int, step_s: float) -> dict[str, Any]:
    """The fields of a row that come from the engine's counters over some steps."""
    return {
        "offloaded_bytes_per_step": stats.offloaded_bytes // steps,
        "copy_gb_per_s": stats.copy_gb_per_s,
        "disk_gb_per_s": stats.disk_gb_per_s or None,
        "stall_ms_per_step": stats.stall_ms / steps,
        "stall_share": stats.stall_ms / steps / 1e3 / step_s,
        "overlap": stats.overlap,
        "recomputed_ms_per_step": stats.recomputed_ms / steps,
    }
