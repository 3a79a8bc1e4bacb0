"""A picture of a case: device memory over one step of each mode, and step times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.offload.results import CaseResult, Row
from rlx.offload.plan.text_table import GB

# A mode whose peak is so many times the smallest peak would flatten the other curves, so it gets a scale of its own.
_OWN_SCALE_FROM = 3.0


def draw(path: Path, title: str, result: CaseResult) -> None:
    """Draw a case into a file; without memory curves it shows step times only. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in result.rows if row.median_s is not None]
    watched = [row for row in measured if row.curve is not None]
    heights = [1.1] * len(watched) + [0.6 + 0.28 * len(measured)]
    figure, axes = pyplot.subplots(
        len(heights), figsize=(9, sum(heights) + 1.2), height_ratios=heights, layout="constrained", squeeze=False
    )
    colours = {row.mode: f"C{number % 10}" for number, row in enumerate(measured)}
    _draw_memory(axes[:-1, 0], watched, colours)
    _draw_times(axes[-1, 0], measured, colours)
    figure.suptitle(f"{title}\n{result.tokens} tokens x {result.layers} layers", fontsize=10)
    if watched:
        figure.supylabel("device memory above weights and gradients [GB]", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_memory(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    peaks_gb = [max(row.curve.used_bytes) / GB for row in rows if row.curve is not None]
    common_gb = max((peak for peak in peaks_gb if peak < _OWN_SCALE_FROM * min(peaks_gb)), default=0.0)
    longest_s = max((row.median_s for row in rows if row.median_s is not None), default=0.0)
    for axis, row, peak_gb in zip(axes, rows, peaks_gb, strict=True):
        assert row.curve is not None and row.median_s is not None
        # The observed step waited at every module, so its curve is scaled to the median step time.
        stretch = row.median_s / row.curve.seconds[-1]
        seconds = [0.0, *(moment * stretch for moment in row.curve.seconds)]
        used_gb = [0.0, *(used / GB for used in row.curve.used_bytes)]
        axis.fill_between(seconds, used_gb, step="pre", color=colours[row.mode], linewidth=0, alpha=0.8)
        axis.axhline(peak_gb, color="black", linewidth=0.6, linestyle="--")
        axis.set_xlim(0, longest_s)
        axis.set_ylim(0, 1.3 * max(common_gb, peak_gb))
        axis.grid(alpha=0.3)
        own_scale = " (scale of its own)" if peak_gb > common_gb else ""
        axis.set_title(f"{row.mode}: peak {peak_gb:.4g} GB{own_scale}", loc="left", fontsize=9, pad=2)
        axis.tick_params(labelsize=8, labelbottom=axis is axes[-1])
    if rows:
        axes[-1].set_xlabel("time in the step [s]", fontsize=9)


def _draw_times(axis: Any, rows: list[Row], colours: dict[str, str]) -> None:
    base = next((name for name in ("plain", "checkpointing") if any(row.mode == name for row in rows)), None)
    lengths = [getattr(row, f"ratio_to_{base}") if base else row.median_s for row in rows]
    bars = axis.barh([row.mode for row in rows], lengths, color=[colours[row.mode] for row in rows], alpha=0.8)
    notes = [f" ({row.note})" if row.note else "" for row in rows]
    labels = [f" {value:.3f}{note}" for value, note in zip(lengths, notes, strict=True)]
    axis.bar_label(bars, labels, fontsize=8)
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.set_xlabel(f"step time / {base}'s" if base else "step time [s]", fontsize=9)
