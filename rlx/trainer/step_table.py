"""The table of steps on the console: a row for each step, and lines with the memory around its phases."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from rlx.trainer.phases import PHASES

MEMORY_CHANGE = 0.05  # smaller changes are noise, such as caches of libraries and file reads


def number(value: float, width: int) -> str:
    """Format a float with at most three decimals, fewer if it would not fit; tiny ones as 1.2e-05 if that fits."""
    if value != 0 and abs(value) < 0.0005 and width >= len("-1.2e-05"):
        return f"{value:.1e}"
    for decimals in (3, 2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:.0e}"


def count(value: float) -> str:
    """Format a quantity without a fixed scale in five characters: 4.3, 9950, 12.3k, 123k, 4.5M."""
    if abs(value) < 10_000 or not math.isfinite(value):
        return f"{value:.{1 if abs(value) < 10 else 0}f}"
    scale, unit = next(((s, u) for s, u in ((1e3, "k"), (1e6, "M"), (1e9, "G")) if abs(value) < 1e3 * s), (1e12, "T"))
    return f"{value / scale:.{1 if abs(value) < 100 * scale else 0}f}{unit}"


class ProgressColumn(NamedTuple):
    """One column of the step table."""

    title: str  # in the header
    metrics: tuple[str, ...]  # the column shows the first of these that a step has, else "-"
    width: int  # in characters
    form: Callable[[float], str]  # formats the number
    drop: int  # order on narrow terminals; the column with the highest number is dropped first


# KL is the KL to the reference if the run has one, else the KL between the policy before and after the step; mism is the mean
# difference between the sampler's and the trainer's log-probs.
PROGRESS_COLUMNS = (
    ProgressColumn("reward", ("reward/mean",), 6, partial(number, width=6), 0),
    ProgressColumn("acc", ("reward/accuracy",), 6, "{:.1%}".format, 1),
    ProgressColumn("len", ("response_length/mean",), 5, count, 6),
    ProgressColumn("turns", ("conversation/turns_mean",), 5, partial(number, width=5), 7),
    ProgressColumn("KL", ("actor/kl_ref", "actor/ppo_kl"), 8, partial(number, width=8), 2),
    ProgressColumn("mism", ("mismatch/mean_abs_log_prob",), 8, partial(number, width=8), 9),
    ProgressColumn("entropy", ("actor/entropy",), 7, partial(number, width=7), 5),
    ProgressColumn("clip", ("actor/clip_fraction",), 5, "{:.1%}".format, 7),
    ProgressColumn("grad", ("actor/grad_norm",), 7, partial(number, width=7), 3),
    ProgressColumn("vloss", ("critic/vf_loss",), 6, partial(number, width=6), 8),
    ProgressColumn("tok/s", ("perf/tokens_per_second",), 6, count, 8),
    ProgressColumn("saved", ("actor/tokens_saved",), 5, "{:.0%}".format, 9),
    ProgressColumn("sec", ("timing_s/step",), 6, "{:.1f}".format, 4),
    ProgressColumn("offMB", ("perf/offloaded_mb",), 5, count, 9),
    ProgressColumn("stall", ("perf/stall_share",), 5, "{:.1%}".format, 11),
    ProgressColumn("peakGB", ("perf/peak_memory_gb",), 6, partial(number, width=6), 10),
)


ONLY_WITH = {
    "turns": "conversation/turns_mean",
    "mism": "mismatch/mean_abs_log_prob",
    "vloss": "critic/vf_loss",
    "saved": "actor/tokens_saved",
    "offMB": "perf/offloaded_mb",
    "stall": "perf/offloaded_mb",
}
"""Columns that are shown from the first row on that has this metric, and not as 0: they belong to what a run may leave off."""
LEGEND = {
    "acc": "right answers",
    "KL": "to the reference, or of the update",
    "mism": "sampler against trainer",
    "clip": "clipped ratios",
    "saved": "tokens computed once",
    "stall": "waiting for offload",
}
"""What the titles mean that one may not guess. docs/metrics.md has all."""
PHASE_TITLES = ("seconds by phase", "s by phase", "phases")  # the longest that fits


class StepTable:
    """Formats header and rows for a line of `width` characters, with the columns of ONLY_WITH that are among `optional`."""

    def __init__(self, width: int, total_steps: int, optional: Set[str] = frozenset(ONLY_WITH)) -> None:
        self.total_steps = total_steps
        self.step_width = len(f"{total_steps}/{total_steps}")
        columns = [each for each in PROGRESS_COLUMNS if each.title not in ONLY_WITH or each.title in optional]
        while len(columns) > 1 and self._used(columns) > width:
            columns.remove(max(columns, key=lambda column: column.drop))
        self.columns = tuple(columns)
        self.phase_width = width - self._used(columns) - 2

    def _used(self, columns: Sequence[ProgressColumn]) -> int:
        return self.step_width + sum(column.width + 1 for column in columns)

    def header(self) -> str:
        """Return the titles."""
        cells = ["step".rjust(self.step_width), *(column.title.rjust(column.width) for column in self.columns)]
        title = next((title for title in PHASE_TITLES if len(title) <= self.phase_width), "")
        return " ".join(cells) + (f"  {title}" if title else "")

    def legend(self, metrics: Mapping[str, float]) -> list[str]:
        """Return two lines: what the less plain of the columns with a value mean, and the names of phases."""
        shown = {column.title for column in self.columns if any(name in metrics for name in column.metrics)}
        meanings = "; ".join(f"{title}: {meaning}" for title, meaning in LEGEND.items() if title in shown)
        names = [(PHASES[name].label, name) for name in PHASES if f"timing_s/{name}" in metrics]
        phases = ", ".join(f"{label} {name.replace('_', ' ')}" for label, name in names if label != name)
        return [meanings, f"{f'phases: {phases}; ' if phases else ''}all columns: docs/metrics.md"]

    def row(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the row of one step; a missing metric shows as "-"."""
        cells = [f"{step}/{self.total_steps}".rjust(self.step_width)]
        for column in self.columns:
            value = next((metrics[name] for name in column.metrics if name in metrics), None)
            cells.append(("-" if value is None else column.form(value)).rjust(column.width))
        return (" ".join(cells) + "  " + self._phases(metrics)).rstrip()

    def _phases(self, metrics: Mapping[str, float]) -> str:
        """Return the longest phases that fit, in the order of the step."""
        spent = {k.removeprefix("timing_s/"): v for k, v in metrics.items() if k.startswith("timing_s/")}
        spent.pop("step", None)
        order = [*PHASES, *(name for name in spent if name not in PHASES)]
        shown: dict[str, str] = {}
        room = self.phase_width
        for name in sorted(spent, key=lambda phase: -spent[phase]):
            cell = f"{PHASES[name].label if name in PHASES else name} {spent[name]:.1f}"
            if spent[name] < 0.05 or len(cell) > room:
                break
            shown[name] = cell
            room -= len(cell) + 1
        return " ".join(shown[name] for name in order if name in shown)


class MemoryTable:
    """The lines under a row that show the memory in use before and after each phase.

    They appear below a header and when a figure has changed. Without them the last ones still apply.
    """

    def __init__(self) -> None:
        self._shown: dict[str, tuple[float, float]] = {}  # before and after, by phase [GB]

    def lines(self, metrics: Mapping[str, float], width: int, with_header: bool) -> list[str]:
        """Return cells like `roll 3.20>61.0` in the order of the step, in lines of `width` characters; none if nothing is new."""
        figures = {
            phase: (metrics[f"memory/{phase}_before_gb"], metrics[f"memory/{phase}_after_gb"])
            for phase in PHASES
            if f"memory/{phase}_before_gb" in metrics
        }
        if not figures or not (with_header or any(self._is_new(*figure) for figure in figures.items())):
            return []
        self._shown |= figures
        cells = (
            f"{PHASES[phase].label}\xa0{number(before, 4)}>{number(after, 4)}"
            for phase, (before, after) in figures.items()
        )
        text = "GB\xa0before>after: " + " ".join(cells)
        folded = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
        return [line.replace("\xa0", " ") for line in folded]

    def _is_new(self, phase: str, figures: tuple[float, float]) -> bool:
        known = self._shown.get(phase)
        return known is None or any(abs(x - old) > MEMORY_CHANGE * old for x, old in zip(figures, known, strict=True))
