"""A picture of a case: device memory over one step of each mode, and what a step costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlx.offload.benchmark.report import GB
from rlx.offload.benchmark.results import CaseResult, Row


def draw(path: Path, title: str, result: CaseResult) -> None:
    """Write the picture of a case; without curves it has the step times only.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result.rows if row.median_s is not None]
    colours = dict(zip([row.mode for row in rows], pyplot.get_cmap("tab10").colors * 2, strict=False))  # type: ignore[attr-defined]
    with_memory = any(row.curve is not None for row in rows)
    bars_height = 0.8 + 0.32 * len(rows)
    heights = [4.2, bars_height] if with_memory else [bars_height]
    figure, axes = pyplot.subplots(
        len(heights), figsize=(9, sum(heights) + 1), height_ratios=heights, layout="constrained", squeeze=False
    )
    if with_memory:
        _draw_memory(axes[0, 0], rows, colours)
    _draw_times(axes[-1, 0], rows, colours)
    figure.suptitle(f"{title}\n{result.case}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_memory(axis: Any, rows: list[Row], colours: dict[str, Any]) -> None:
    for row in rows:
        if row.curve is None or row.median_s is None:
            continue
        # The step that was looked at waited at every module; its length is brought back to that of the others.
        stretch = row.median_s / row.curve.seconds[-1]
        seconds = [0.0, *(moment * stretch for moment in row.curve.seconds)]
        used_gb = [0.0, *(used / GB for used in row.curve.used_bytes)]
        axis.step(
            seconds, used_gb, color=colours[row.mode], linewidth=1, label=f"{row.mode}: peak {max(used_gb):.2f} GB"
        )
    axis.set_xlabel("time in the step [s]")
    axis.set_ylabel("device memory above weights and gradients [GB]")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_times(axis: Any, rows: list[Row], colours: dict[str, Any]) -> None:
    base = next((name for name in ("plain", "checkpointing") if any(row.mode == name for row in rows)), None)
    lengths = [getattr(row, f"ratio_to_{base}") if base else row.median_s for row in rows]
    bars = axis.barh([row.mode for row in rows], lengths, color=[colours[row.mode] for row in rows])
    axis.bar_label(
        bars, [f" {value:.3f}" + (" (scaled)" if row.note else "") for row, value in zip(rows, lengths, strict=True)]
    )
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.set_xlabel(f"step time / {base}'s" if base else "step time [s]")
