"""The results of a benchmark: all of them go to a JSON file, most of them into a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlx.offload.plan.text_table import GB, aligned
from rlx.offload.storage.stats import OffloadStats


@dataclass(frozen=True)
class MemoryCurve:
    """Device memory over one step: at each point in time, the peak since the point before."""

    seconds: Sequence[float]  # since the step began
    used_bytes: Sequence[int]  # above weights and gradients


@dataclass(frozen=True)
class Row:
    """One mode in one case. A field that is None was not measured; `note` tells why."""

    mode: str
    note: str | None = None
    layers: int = 0
    step_s: Sequence[float] = ()  # of the slowest process; scaled if `layers` is less than the case's
    median_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    ratio_to_plain: float | None = None
    ratio_to_checkpointing: float | None = None
    peak_bytes: int | None = None  # device memory above weights and gradients; None if scaled, and on the CPU
    standing_bytes: int | None = None  # device memory between steps, if each mode has weights of its own
    streamed_bytes: int | None = None  # frozen weights that wait on the host; None if none do
    streaming_stall_ms_per_step: float | None = None  # waiting for them
    offloaded_bytes_per_step: int | None = None
    held_bytes: int | None = None  # off the device at the end of forward
    copy_gb_per_s: float | None = None
    disk_gb_per_s: float | None = None  # None if nothing went to disk
    stall_ms_per_step: float | None = None
    stall_share: float | None = None  # of the step's time
    overlap: float | None = None  # share of the time of copies and disk in which compute did not wait
    recomputed_ms_per_step: float | None = None
    predicted_s: float | None = None  # by the plan of auto, as the next one
    predicted_peak_bytes: int | None = None
    curve: MemoryCurve | None = None


@dataclass(frozen=True)
class HostMemoryUse:
    """Host memory and disk over all modes of a case."""

    reserved_bytes: int  # host memory that the arenas have reserved from the system
    disk_reserved_bytes: int  # size of the file
    largest_held_bytes: int  # of any mode at the end of its forward, in host memory and on disk
    reserved_to_held: float | None  # sum of both reserved amounts divided by the held one; None if nothing was held
    allocations_after_warm_up: int  # how often memory was reserved from the system during timed steps


@dataclass(frozen=True)
class CaseResult:
    """All modes of one case."""

    tokens: int
    layers: int
    rows: Sequence[Row]
    host: HostMemoryUse
    seconds: float = 0.0


def engine_figures(stats: OffloadStats, steps: int, step_s: float) -> dict[str, Any]:
    """Return the fields of a row that come from the engine's counters over a number of steps."""
    return {
        "offloaded_bytes_per_step": stats.offloaded_bytes // steps,
        "copy_gb_per_s": stats.copy_gb_per_s,
        "disk_gb_per_s": stats.disk_gb_per_s or None,
        "stall_ms_per_step": stats.stall_ms / steps,
        "stall_share": stats.stall_ms / steps / 1e3 / step_s,
        "overlap": stats.overlap,
        "recomputed_ms_per_step": stats.recomputed_ms / steps,
    }


# Heading, field of `Row`, format, unit.
_COLUMNS = (
    ("step s", "median_s", ".4f", 1),
    ("min", "min_s", ".4f", 1),
    ("max", "max_s", ".4f", 1),
    ("x plain", "ratio_to_plain", ".3f", 1),
    ("x ckpt", "ratio_to_checkpointing", ".4f", 1),
    ("peak GB", "peak_bytes", ".4g", GB),
    ("weights GB", "standing_bytes", ".4g", GB),
    ("streamed GB", "streamed_bytes", ".4g", GB),
    ("its stall ms", "streaming_stall_ms_per_step", ".2f", 1),
    ("off GB", "offloaded_bytes_per_step", ".4g", GB),
    ("GB/s", "copy_gb_per_s", ".1f", 1),
    ("disk GB/s", "disk_gb_per_s", ".2f", 1),
    ("stall ms", "stall_ms_per_step", ".2f", 1),
    ("stall %", "stall_share", ".2f", 0.01),
    ("overlap", "overlap", ".3f", 1),
    ("predicted s", "predicted_s", ".4f", 1),
    ("predicted GB", "predicted_peak_bytes", ".4g", GB),
)


def table(result: CaseResult) -> str:
    """Return a case as text: one line per mode with the measured columns, then notes and host memory."""
    measured = [row for row in result.rows if row.median_s is not None]
    cells = [["mode", *(row.mode for row in measured)]]
    for heading, field, digits, unit in _COLUMNS:
        values = [getattr(row, field) for row in measured]
        if any(value is not None for value in values):
            cells.append([heading, *("-" if value is None else f"{value / unit:{digits}}" for value in values)])
    lines = aligned(list(zip(*cells, strict=True))) if measured else []
    lines += [f"{row.mode}: {row.note}" for row in result.rows if row.note is not None]
    host = result.host
    if host.largest_held_bytes:
        on_disk = f" and {host.disk_reserved_bytes / GB:.4g} GB on disk" if host.disk_reserved_bytes else ""
        lines.append(
            f"host memory: {host.reserved_bytes / GB:.4g} GB{on_disk} reserved, {host.largest_held_bytes / GB:.4g} GB held "
            f"at most, quotient {host.reserved_to_held:.3f}; allocations after warm-up: {host.allocations_after_warm_up}"
        )
    return "\n".join(lines)


def write_json(path: Path, about: dict[str, Any], results: Sequence[CaseResult]) -> None:
    """Write all results, and `about`, to a JSON file."""
    path.write_text(json.dumps({**about, "cases": [asdict(result) for result in results]}) + "\n")
