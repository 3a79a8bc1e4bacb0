"""Results as a table for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx.offload.benchmark.results import CaseResult
from rlx.offload.plan.text_table import GB, aligned


def _number(digits: int, scale: float = 1.0) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else f"{value / scale:.{digits}f}"


def _digits(digits: int, scale: float) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else f"{value / scale:.{digits}g}"


_REPORT_COLUMNS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("mode", "mode", str),
    ("step s", "median_s", _number(4)),
    ("min", "min_s", _number(4)),
    ("max", "max_s", _number(4)),
    ("x plain", "ratio_to_plain", _number(3)),
    ("x ckpt", "ratio_to_checkpointing", _number(4)),
    ("peak GB", "peak_bytes", _digits(4, GB)),
    ("off GB", "offloaded_bytes_per_step", _digits(4, GB)),
    ("GB/s", "copy_gb_per_s", _number(1)),
    ("disk GB/s", "disk_gb_per_s", _number(2)),
    ("stall ms", "stall_ms_per_step", _number(2)),
    ("stall %", "stall_share", _number(2, 0.01)),
    ("overlap", "overlap", _number(3)),
    ("predicted s", "predicted_s", _number(4)),
    ("predicted GB", "predicted_peak_bytes", _digits(4, GB)),
)


def table(result: CaseResult) -> str:
    """Return a case as text: one line per mode with the measured columns, then notes and host memory."""
    measured = [row for row in result.rows if row.median_s is not None]
    columns = [c for c in _REPORT_COLUMNS if any(getattr(row, c[1]) is not None for row in measured)]
    cells = [[show(getattr(row, name)) for _, name, show in columns] for row in measured]
    lines = aligned([[title for title, _, _ in columns], *cells]) if measured else []
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
