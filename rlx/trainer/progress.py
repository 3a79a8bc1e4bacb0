"""The console of a run: the bar, one row per step, notices, generations, the summary.

On a terminal a bar with the current phase stays at the bottom and rows scroll above it. Elsewhere (a pipe, CI, the log of a Ray
job) the same rows are plain lines without control characters.
"""

import logging
import math
import os
import re
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from rlx.errors import wrapped
from rlx.trainer.tracking import METRICS_FILE


class StepPhase(NamedTuple):
    """One phase; its name is that of its metrics."""

    label: str  # short, for a row of the console
    color: str  # in the report
    calls: tuple[str, ...] = ()  # of the workers, in their order


PHASES = {
    "rollout": StepPhase("roll", "#2563eb", ("rollout.generate",)),
    "reward": StepPhase("rew", "#93b4f5", ("reward.scores",)),
    "old_log_prob": StepPhase("old", "#f4b942", ("actor.log_probs",)),
    "ref": StepPhase("ref", "#ea7317", ("ref.log_probs", "actor.ref_log_probs")),
    "values": StepPhase("value", "#a78bda", ("critic.values",)),
    "advantages": StepPhase("adv", "#cbd2d9"),
    "update_critic": StepPhase("critic", "#6d3fb0", ("critic.update",)),
    "update_actor": StepPhase("actor", "#16966b", ("actor.first_update", "actor.update_equal", "actor.update")),
    "sync": StepPhase("sync", "#8fd3bb", ("rollout.sync",)),
    "validate": StepPhase("val", "#c8324a", ("rollout.generate",)),
    "checkpoint": StepPhase("save", "#52606d", ("actor.begin_save", "critic.begin_save")),
}
"""In the order of a step; the last two follow only some steps."""


class Span(NamedTuple):
    """A phase on the driver, by `time.perf_counter`."""

    name: str
    start: float
    end: float


PLAIN_WIDTH = 120
HEADER_EVERY = 15
QUIET_S, TICK_S, LONGER = 5.0, 0.5, 1.5  # without a line; between two looks; growth of the time to the next line
MOSTLY, OFTEN = 0.5, 0.1  # shares of truncated responses that give a notice, and at the end a line of the summary
STEPS_PER_MEAN = 5  # the summary compares means over this many steps, because the reward of one batch is noise


def duration(value: float) -> str:
    """Format a duration for people: 7.3s, 2m05s, 3h07m."""
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def held_out(found: Sequence[tuple[float | None, float]]) -> str:
    """Format the accuracies of validations, each with its step if that is known: 31.0% -> 84.5% (+53.5 points), step 0 -> 40."""
    steps = ["?" if step is None else f"{step:.0f}" for step, _ in found]
    (_, before), (_, after) = found[0], found[-1]
    if len(found) == 1:
        return f"{after:.1%} at step {steps[0]}{', before training' if steps[0] == '0' else ''}"
    points = 100 * (after - before)
    return f"{before:.1%} -> {after:.1%} ({points:+.1f} points), step {steps[0]} -> {steps[-1]}"


def reward_change(rewards: Sequence[float]) -> str:
    """Say how the rewards of steps changed, for the summary and the report: `sampled reward, mean of 5 steps: 0.375 -> 0.412`."""
    steps = max(1, min(STEPS_PER_MEAN, len(rewards) // 2))
    first, last = (sum(part) / steps for part in (rewards[:steps], rewards[-steps:]))
    label = "sampled reward" if steps == 1 else f"sampled reward, mean of {steps} steps"
    return f"{label}: {first:.3f}" + (f" -> {last:.3f}" if len(rewards) > 1 else "")


def printable(text: str, encoding: str) -> str:
    """Return `text` with escapes for a model's control characters and for characters that the stream cannot encode."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


class Progress(logging.Handler):
    """The console of one run. Inside `with progress:` the bar is visible; rows, notices and summary may come at any time.

    Meanwhile it shows what rlx logs, also in workers: warnings as notices, the rest as remarks.
    """

    def __init__(
        self,
        total_steps: int,  # of the whole run, including those before a resume
        console: bool = True,  # False omits the row of each step; bar, notices and summary stay
        stream: TextIO | None = None,  # None: standard output
        verbose: bool = False,  # show the memory around each phase, too
        where_answers_are: str = "set trainer.transcripts=True",  # how to read the samples of a step, as a clause
    ) -> None:
        super().__init__(logging.INFO)
        stream = stream or sys.stdout
        # Ask the stream itself: rich also follows FORCE_COLOR, which CI systems set for their log files.
        self._live = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        plain: dict[str, Any] = {"width": PLAIN_WIDTH, "force_terminal": False, "color_system": None}
        self._console = Console(file=stream, highlight=False, markup=False, **({} if self._live else plain))
        self._table = console
        self._total_steps = total_steps
        self._bar = RichProgress(
            TextColumn("{task.description:<13}", style="cyan", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left", style="dim"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            disable=not self._live,
            speed_estimate_period=3600.0,  # rich's 30 s would forget longer steps and show no estimate
        )
        self._task = self._bar.add_task("start", total=total_steps)
        self._started = time.perf_counter()
        self._first_step: int | None = None
        self._first_step_began = 0.0
        self._step = 0
        self.spans: list[Span] = []  # of the step's phases
        self.step_began = 0.0
        self._failed_phase: str | None = None
        self._rows = 0
        self._optional: set[str] = set()  # columns of ONLY_WITH that have had a value
        self._memory = MemoryTable() if verbose else None
        self._rewards: list[float] = []
        self._truncated: list[float] = []
        self._steps_without_advantage = 0
        self._has_told_of_limit = False
        self._where_answers_are = where_answers_are
        self._over = threading.Event()
        self._phase: tuple[str, float] | None = None  # the one that runs, and when it began
        self._between = self._last_line = self._started  # end of the last phase; last line

    def __enter__(self) -> "Progress":
        self._bar.start()
        logging.getLogger("rlx").addHandler(self)
        logging.getLogger("rlx").setLevel(logging.INFO)
        if not self._live:
            threading.Thread(target=self._break_silences, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._bar.stop()
        logging.getLogger("rlx").removeHandler(self)
        if kind is not None and self._failed_phase is not None:
            self.notice(f"stopped in step {self._step}, phase {self._failed_phase}")

    def emit(self, record: logging.LogRecord) -> None:
        (self.notice if record.levelno >= logging.WARNING else self.remark)(record.getMessage())

    @property
    def start_s(self) -> float:
        """Seconds from the beginning to the first step."""
        return max(0.0, self._first_step_began - self._started)

    @contextmanager
    def step(self, number: int) -> Iterator[dict[str, float]]:
        """Time one step, counted from 1; the dict gets `timing_s/<phase>` and `timing_s/step` [s] at its end."""
        if self._first_step is None:  # the estimate leaves out the start-up and a resumed run's earlier steps
            self._first_step, self._first_step_began = number, time.perf_counter()
            self._bar.reset(self._task, completed=number - 1)
        self._step = number
        self.spans.clear()
        timings: dict[str, float] = {}
        self.step_began = time.perf_counter()
        yield timings
        seconds = Counter[str]()
        for name, start, end in self.spans:
            seconds[name] += end - start
        timings |= {f"timing_s/{name}": spent for name, spent in seconds.items()}
        timings["timing_s/step"] = time.perf_counter() - self.step_began
        self._bar.update(self._task, completed=number)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` next to the bar; the seconds inside count for the step."""
        began = time.perf_counter()
        self._bar.update(self._task, description=name)
        self._phase = name, began
        try:
            yield
        except BaseException:
            self._failed_phase = self._failed_phase or name
            raise
        finally:
            self._phase, self._between = None, time.perf_counter()
            self.spans.append(Span(name, began, self._between))

    def _break_silences(self) -> None:
        """Without a terminal, say what runs after QUIET_S without a line, and in the same phase after ever longer times."""
        quiet_s, before = QUIET_S, self._phase
        while not self._over.wait(TICK_S):
            now, phase = time.perf_counter(), self._phase
            if phase is not before:
                quiet_s, before = QUIET_S, phase
            if now - self._last_line >= quiet_s:
                name, began = phase or ("loading" if not self._step else "between phases", self._between)
                step = f"step {self._step}/{self._total_steps}: " if self._step else ""
                self._line(f"  … {step}{name.replace('_', ' ')}, {duration(now - began)}", "dim")
                quiet_s *= LONGER

    def row(self, metrics: Mapping[str, float], step: int) -> None:
        """Show one row of the table, and a line of held-out results if `metrics` has them; step 0 is before training."""
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
            self._truncated.append(metrics.get("response_length/clip_ratio", 0.0))
            if metrics.get("train/zero_advantage_share") == 1:
                self._steps_without_advantage += 1  # a weak model has many, which the summary counts
                if self._steps_without_advantage == 1:
                    self.notice(
                        f"step {step}: all advantages are zero, because all answers of a prompt got the same reward; raise "
                        "data.train_batch_size or actor_rollout_ref.rollout.n, take easier or harder prompts, or give partial credit in "
                        f"the reward function (docs/watch.md). To read the answers, {self._where_answers_are}. The summary at the end "
                        "counts such steps"
                    )
            if metrics.get("response_length/clip_ratio", 0.0) > MOSTLY and not self._has_told_of_limit:
                self._has_told_of_limit = True
                self.notice(
                    f"step {step}: {metrics['response_length/clip_ratio']:.0%} of the responses were truncated, see "
                    "response_length/clip_ratio; if the reward stays flat, raise data.max_response_length or ask for shorter answers"
                )
            if self._table:
                self._table_row(metrics, step)
        if "val/accuracy" in metrics:
            text = f"step {step}: held-out accuracy {metrics['val/accuracy']:.1%}"
            if "val/reward" in metrics:
                text += f", reward {metrics['val/reward']:.3f}"
            self._line(text, "bold green")

    def _table_row(self, metrics: Mapping[str, float], step: int) -> None:
        new = {title for title, name in ONLY_WITH.items() if metrics.get(name)} - self._optional
        self._optional |= new
        table = StepTable(self._console.width, self._total_steps, self._optional)
        if with_header := self._rows % HEADER_EVERY == 0 or bool(new):
            if self._rows and not self._live and self._first_step is not None:
                elapsed = time.perf_counter() - self._first_step_began
                left = elapsed / (step - self._first_step + 1) * (self._total_steps - step)
                self._line(f"elapsed {duration(elapsed)}, about {duration(left)} left")
            if not self._rows:
                for line in table.legend(metrics):
                    self._line(line, "dim")
            self._line(table.header(), "bold")
        self._rows += 1
        self._line(table.row(step, metrics))
        for line in self._memory.lines(metrics, self._console.width, with_header) if self._memory else ():
            self._line(line, "dim")

    def notice(self, text: str) -> None:
        self._line(wrapped(f"! {text}"), "yellow")

    def remark(self, text: str) -> None:
        self._line(text, "dim")

    def generations(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show some generations; each row maps a name (prompt, response, score, ...) to its value. Of blank lines one is left."""
        for row in rows:
            self._panel({name: re.sub(r"\n\s*\n", "\n\n", str(value)) for name, value in row.items()}, None)

    def summary(
        self,
        first_validation: Mapping[str, float],
        last_validation: Mapping[str, float],
        folder: Path,
        picture: Path | None,
        restarts: Sequence[str] = (),
        costliest: str = "",
    ) -> None:
        """Show the closing panel with results and duration, and below it the folders of run and report.

        Validations are metrics with `val/accuracy` and their `step`, which checkpoints of older versions lack: one object after a
        single validation, empty after none. `restarts` are the reasons of the restarts in order. `costliest` says
        what took the most time.
        """
        facts: dict[str, str] = {}
        is_resumed = self._first_step is not None and self._first_step > 1
        part = f", from step {self._first_step} on" if is_resumed else ""
        if last_validation:
            is_one = first_validation is last_validation
            both = [last_validation] if is_one else [first_validation, last_validation]
            facts["held-out accuracy"] = held_out([(each.get("step"), each["val/accuracy"]) for each in both])
        if len(self._rewards) > 1:
            label, _, values = reward_change(self._rewards).partition(": ")
            facts[label] = values + part
        if self._steps_without_advantage:
            facts["all advantages zero"] = f"in {self._steps_without_advantage} of {len(self._rewards)} steps{part}"
        last = self._truncated[-STEPS_PER_MEAN:]
        if last and (share := sum(last) / len(last)) > OFTEN:
            remedy = "a larger data.max_response_length lets them end"
            facts["truncated responses"] = f"{share:.0%} in the last {len(last)} step(s); {remedy}"
        facts |= {f"restart {number}": reason for number, reason in enumerate(restarts, start=1)}
        if costliest:
            facts["most time"] = costliest
        facts["wall time"] = duration(time.perf_counter() - self._started) + part
        self._panel(facts, "summary")
        # Below the box, which would break long paths.
        places = {"run": folder} | ({} if picture is None else {"report": picture})
        for name, part in (("metrics", METRICS_FILE), ("generations", "validation"), ("checkpoints", "checkpoints")):
            if (folder / part).exists():
                places[name] = folder / part
        for name, path in places.items():
            self._line(f"{name:<12} {path}")

    def _panel(self, facts: Mapping[str, str], title: str | None) -> None:
        grid = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            grid.add_row(Text(name, "dim"), Text(printable(value, self._console.encoding), overflow="fold"))
        self._console.print(Panel(grid, title=title, title_align="left", expand=False))

    def _line(self, text: str, style: str = "") -> None:
        self._last_line = time.perf_counter()
        self._console.print(Text(printable(text, self._console.encoding), style), soft_wrap=True)


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
        cells = ["step".rjust(self.step_width), *(column.title.rjust(column.width) for column in self.columns)]
        return " ".join(cells) + "  s by phase" * (self.phase_width >= len("s by phase"))

    def legend(self, metrics: Mapping[str, float]) -> list[str]:
        """Return two lines: what the less plain of the columns with a value mean, and the names of phases."""
        shown = {column.title for column in self.columns if any(name in metrics for name in column.metrics)}
        meanings = "; ".join(f"{title}: {meaning}" for title, meaning in LEGEND.items() if title in shown)
        names = [(PHASES[name].label, name) for name in PHASES if f"timing_s/{name}" in metrics]
        phases = ", ".join(f"{label}={name.replace('_', ' ')}" for label, name in names if label != name)
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
    """The lines under a row that show the memory in use before and after each phase, if a figure has changed."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[float, float]] = {}  # before and after, by phase [GB]

    def lines(self, metrics: Mapping[str, float], width: int, with_header: bool) -> list[str]:
        """Return cells like `roll 3.20>61.0` in the order of the step, in lines of `width` characters; none if nothing is new."""
        figures = {
            phase: (metrics[f"memory/{phase}_before_gb"], metrics[f"memory/{phase}_after_gb"])
            for phase in PHASES
            if f"memory/{phase}_before_gb" in metrics
        }
        pairs = (pair for phase in figures for pair in zip(figures[phase], self._shown.get(phase, (0, 0)), strict=True))
        if not (figures and with_header) and not any(abs(x - old) > MEMORY_CHANGE * old for x, old in pairs):
            return []
        self._shown |= figures
        numbers = {phase: ">".join(number(figure, 4) for figure in both) for phase, both in figures.items()}
        cells = (f"{PHASES[phase].label}\xa0{both}" for phase, both in numbers.items())
        text = "GB\xa0before>after: " + " ".join(cells)
        folded = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
        return [line.replace("\xa0", " ") for line in folded]
