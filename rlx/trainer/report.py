"""Draw `report.png` from `metrics.jsonl`: reward, accuracy, KL and entropy, phase times, gradient norm, response length.

Below them is what happened when in the last and in the slowest step, from `timeline.json`.

`python -m rlx.trainer.report RUN_DIR` draws it again, also during the run.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from rlx.errors import ExplainedError, storing
from rlx.program import program
from rlx.trainer.progress import PHASES, held_out, reward_change
from rlx.trainer.timeline import TIMELINE_FILE, Bar, pictures, read_timeline
from rlx.trainer.tracking import METRICS_FILE, TrackingError, read_metrics

INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, RED = "#2563eb", "#ea7317", "#16966b", "#c8324a"
SMOOTH_FROM_STEPS = 24  # with fewer steps a smoothed line adds nothing to the points
MOST_BARS = 120  # with more steps bars cannot be told apart, so means are drawn
DPI = 130
MOST_ROWS = 14  # of a step; `rlx view` shows all
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": GREY}

Series = tuple[list[int], list[float]]
Metrics = Mapping[int, Mapping[str, float]]


def write_report(metrics_jsonl: Path, out_png: Path) -> Path:
    """Draw the picture of a run and return `out_png`, which is replaced if it exists. Panels without numbers say so.

    The title is the last two parts of the run's folder. Raises TrackingError if a line of the file is no metrics, or
    `timeline.json` no timeline; StorageError.
    """
    metrics = read_metrics(metrics_jsonl)
    steps = pictures(read_timeline(metrics_jsonl.parent / TIMELINE_FILE))
    name = " / ".join(metrics_jsonl.resolve().parent.parts[-2:])
    heights = [7.6, *(0.9 + 0.24 * min(len(rows), MOST_ROWS) for _, rows in steps.values())]
    whole = Figure(figsize=(13.5, sum(heights)), facecolor="white")
    FigureCanvasAgg(whole)
    figure, *below = whole.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, (seconds, rows)) in zip(below, steps.items(), strict=True):
        _timeline(part.add_axes((0.24, 0.24, 0.715, 0.62)), title, seconds, rows)
    grid = figure.add_gridspec(2, 3, left=0.05, right=0.955, top=0.84, bottom=0.075, hspace=0.38, wspace=0.3)
    panels = [figure.add_subplot(grid[row, column]) for row in range(2) for column in range(3)]
    for axes, (panel, draw) in zip(panels, PANELS.items(), strict=True):
        style(axes)
        axes.set_title(panel, loc="left", fontsize=11.5, color=INK, fontweight="bold", pad=10)
        draw(axes, metrics)
    figure.text(0.05, 0.955, name, fontsize=16, fontweight="bold", color=INK, va="center")
    figure.text(0.05, 0.912, _headline(metrics), fontsize=11.5, color=GREY, va="center")
    with storing(out_png, "draw it again"):
        whole.savefig(out_png, dpi=DPI)
    return out_png


def _headline(metrics: Metrics) -> str:
    names = ("val/accuracy", "reward/mean", "timing_s/step")
    accuracy, (_, reward), (_, step_s) = (_series(metrics, name) for name in names)
    parts = [f"held-out accuracy {held_out([*zip(*accuracy, strict=True)])}"] if accuracy[0] else []
    parts += [reward_change(reward)] if reward else []
    parts += [f"{len(step_s)} steps, {sum(step_s) / len(step_s):.1f} s each"] if step_s else []
    return "   ·   ".join(parts)


def _series(metrics: Metrics, name: str) -> Series:
    steps = [step for step, row in metrics.items() if name in row]
    return steps, [metrics[step][name] for step in steps]


def style(axes: Axes) -> None:
    """Draw a light grid without a frame."""
    axes.set_facecolor("white")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_xlabel("step", color=GREY, fontsize=9)


def _curve(axes: Axes, metrics: Metrics, name: str, color: str, label: str) -> None:
    """Draw the points, and their running mean over them if there are many."""
    steps, values = _series(metrics, name)
    if len(steps) >= SMOOTH_FROM_STEPS:
        axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.3)
        axes.plot(steps, _running_mean(values), color=color, linewidth=2.0, label=label)
    elif steps:
        axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3.2, label=label)


def _held_out(axes: Axes, series: Series) -> None:
    """Draw the line, and its points if they can be told apart."""
    if series[0]:
        marker = "o" if len(series[0]) <= 30 else ""
        axes.plot(*series, color=ORANGE, linewidth=1.8, marker=marker, markersize=5, label="held-out")


def _right(axes: Axes) -> Axes:
    right = axes.twinx()
    style(right)
    right.grid(visible=False)
    return right


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return means over a window of a tenth of the run around each point, shorter at the ends."""
    reach = max(1, len(values) // 20)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _legend(axes: Axes, *others: Axes) -> None:
    lines = [line for each in (axes, *others) for line in each.get_legend_handles_labels()[0]]
    if lines:
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0.2}
        axes.legend(handles=lines, ncols=2, handlelength=1.4, columnspacing=1.0, **place, **LEGEND)
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
        axes.set_yticks([])


def _reward(axes: Axes, metrics: Metrics) -> None:
    _curve(axes, metrics, "reward/mean", BLUE, "sampled")
    _held_out(axes, _series(metrics, "val/reward"))
    _legend(axes)


def _accuracy(axes: Axes, metrics: Metrics) -> None:
    _curve(axes, metrics, "reward/accuracy", BLUE, "sampled")
    steps, values = _series(metrics, "val/accuracy")
    _held_out(axes, (steps, values))
    for place in {0, len(steps) - 1} if steps else ():
        axes.annotate(
            f"{values[place]:.1%}", (steps[place], values[place]), xytext=(0, 8), textcoords="offset points",
            ha="left" if place == 0 else "right", fontsize=9, fontweight="bold", color=ORANGE,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(y=0.14)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), max(min(high, 1.05), 0.05))
    _legend(axes)


def _kl_and_entropy(axes: Axes, metrics: Metrics) -> None:
    has_reference = any("actor/kl_ref" in row for row in metrics.values())
    name, label = ("actor/kl_ref", "KL (reference)") if has_reference else ("actor/ppo_kl", "KL (step)")
    _curve(axes, metrics, name, RED, label)
    _curve(axes, metrics, "mismatch/kl_k3", ORANGE, "KL (sampler)")
    right = _right(axes)
    _curve(right, metrics, "actor/entropy", GREEN, "entropy, right")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    if not right.lines:
        right.set_yticks([])
    _legend(axes, right)


def _phase_times(axes: Axes, metrics: Metrics) -> None:
    """Draw the seconds of each phase, stacked; phases with less than 1 % of the time count as the rest."""
    rows = {step: row for step, row in metrics.items() if "timing_s/step" in row}
    names = {k.removeprefix("timing_s/") for row in rows.values() for k in row if k.startswith("timing_s/")} - {"step"}
    order = [*(name for name in PHASES if name in names), *sorted(names - PHASES.keys())]
    smooth = _running_mean if len(rows) > MOST_BARS else list
    spent = {name: smooth([row.get(f"timing_s/{name}", 0.0) for row in rows.values()]) for name in order}
    totals = smooth([row["timing_s/step"] for row in rows.values()])
    shown = {name: values for name, values in spent.items() if sum(values) > 0.01 * sum(totals)}
    rest = [max(0.0, total - sum(v[i] for v in shown.values())) for i, total in enumerate(totals)]
    if sum(rest) > 0.01 * sum(totals):
        shown["rest"] = rest
    if not shown:
        _legend(axes)
        return
    edges = [min(rows) - 0.5, *(step + 0.5 for step in rows)]
    bottom = [0.0] * len(rows)
    for name, values in shown.items():
        top = [low + value for low, value in zip(bottom, values, strict=True)]
        color, label = PHASES[name].color if name in PHASES else GREY, name.replace("_", " ")
        axes.stairs(top, edges, baseline=bottom, fill=True, color=color, label=label)
        bottom = top
    axes.set_ylim(0, max(bottom) * (1.15 + 0.08 * math.ceil(len(shown) / 3)) or 1.0)
    place: dict[str, Any] = {"loc": "upper left", "ncols": 3, "borderaxespad": 0.1}
    axes.legend(reverse=True, handlelength=0.9, columnspacing=1.2, **place, **LEGEND)


def _grad_norm(axes: Axes, metrics: Metrics) -> None:
    _curve(axes, metrics, "actor/grad_norm", BLUE, "actor")
    _curve(axes, metrics, "critic/grad_norm", ORANGE, "critic")
    skipped = [step for step, row in metrics.items() if row.get("actor/skipped", 0) + row.get("critic/skipped", 0) > 0]
    for step in skipped:
        axes.axvline(step, color=RED, linewidth=1.0, linestyle=":", label="skipped" if step == skipped[0] else None)
    norms = [v for name in ("actor/grad_norm", "critic/grad_norm") for v in _series(metrics, name)[1] if v > 0]
    if norms and max(norms) / min(norms) > 100 and all(math.isfinite(v) for v in norms):
        axes.set_yscale("log")
    _legend(axes)


def _response_length(axes: Axes, metrics: Metrics) -> None:
    _curve(axes, metrics, "response_length/mean", BLUE, "mean")
    _, cut = _series(metrics, "response_length/clip_ratio")
    others = []
    if max(cut, default=0) > 0:
        others.append(right := _right(axes))
        _curve(right, metrics, "response_length/clip_ratio", RED, "cut off, right")
        right.yaxis.set_major_formatter(PercentFormatter(1.0))
        right.set_ylim(0, min(1.05, 1.3 * max(cut)))
    _legend(axes, *others)


def _timeline(axes: Axes, title: str, seconds: float, rows: Mapping[str, Sequence[Bar]]) -> None:
    """Draw the rows of a step, the first on top."""
    style(axes)
    axes.grid(visible=False)
    shown, colors = dict(list(rows.items())[:MOST_ROWS]), {name: color for *_, color, name in rows["phases"]}
    for line, bars in enumerate(shown.values()):
        for start, end, height, color, _ in bars:
            axes.fill_between([start, end], -line, 0.8 * height - line, color=color, linewidth=0)
    axes.set_yticks([0.4 - line for line in range(len(shown))], list(shown))
    axes.set_xlim(0, seconds or 1.0)
    axes.set_ylim(0.8 - len(shown), 1)
    axes.set_xlabel("seconds", color=GREY, fontsize=9)
    more = f"; {len(rows) - len(shown)} more rows in `{program('view')}`" if len(rows) > len(shown) else ""
    axes.set_title(title + more, loc="left", fontsize=11.5, color=INK, fontweight="bold", pad=10)
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(colors) or 1}
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(handles=patches, handlelength=0.9, columnspacing=1.2, **place, **LEGEND)


PANELS = {
    "Reward": _reward,
    "Accuracy": _accuracy,
    "KL, entropy": _kl_and_entropy,
    "Seconds per step": _phase_times,
    "Gradient norm": _grad_norm,
    "Response tokens": _response_length,
}


def main() -> int:
    """Run the command and return its exit code: 0, or 2 if the folder is not as expected."""
    parser = argparse.ArgumentParser(prog=program("report"), description="Draw report.png of a run.")
    parser.add_argument("run_dir", type=Path, help="the run's folder, which holds metrics.jsonl")
    run_dir: Path = parser.parse_args().run_dir
    try:
        if not (run_dir / METRICS_FILE).is_file():
            what = f"no {METRICS_FILE} in it" if run_dir.is_dir() else "no such folder"
            raise TrackingError(f"{run_dir}: {what}; name that of a run, which the run's first lines show")
        write_report(run_dir / METRICS_FILE, run_dir / "report.png")
    except ExplainedError as error:
        print(f"{program('report')}: {error}", file=sys.stderr)
        return 2
    print(run_dir / "report.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
