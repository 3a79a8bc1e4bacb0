"""Pack samples and metrics into one HTML page.

The page holds data alone as base64 of gzip, and `page.js` writes it as text. So nothing that a model or a tool wrote is ever parsed
as HTML, and a policy in the page's head lets no other script run. The list of samples is one block; their tokens are in
blocks of about 1 MB, each of which is unpacked when one of its samples is looked at.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from rlx.checkpoint.folders import replacing_file
from rlx.errors import ExplainedError, storing
from rlx.program import program
from rlx.trainer.timeline import TIMELINE_FILE, pictures, read_timeline
from rlx.trainer.tracking import METRICS_FILE, read_metrics

BLOCK_BYTES = 1_000_000  # of JSON; a browser unpacks it in some milliseconds
FIRST_GUESS = 0.3  # of the share of its bytes that packed JSON has
SHOWN_DIGITS = 4  # significant ones of a number in the page
TITLE_LENGTH = 100
LARGEST_GAP = 1.0  # nats, whose colour is full
LARGEST = 1 << 53  # of whole numbers that a browser reads
Sample = dict[str, Any]
OF_TOKENS = ("token_ids", "tokens", "loss_mask", "advantages", "log_prob_gap")
"""The lists of a sample with an entry per token."""
_NAME = re.compile(r"step_([0-9]{1,15})\.jsonl")


class ViewError(ExplainedError, ValueError):
    """A run has nothing to show, or a file of it cannot be read."""


class Page(NamedTuple):
    """What a page shows: steps, samples, and how many of these without their tokens."""

    steps: int
    samples: int
    left_out: int


def write_page(
    run: Path, out: Path, first: int | None = None, last: int | None = None, most_bytes: int = 1 << 26
) -> Page:
    """Write the page of a run's folder, with the steps from `first` to `last`, both included.

    All samples' tokens have `most_bytes`, of which each step has an equal share. Samples beyond it are listed without their tokens,
    and the page says so. Raises ViewError or TrackingError if there is nothing to show, or a line cannot be read.
    """
    timeline = read_timeline(run / TIMELINE_FILE)
    chosen = _transcripts(run, first, last, may_lack=bool(timeline))
    packed = _Packed(most_bytes)
    for done, file in enumerate(chosen.values(), 1):
        packed.begin_step(most_bytes * done // len(chosen))
        if not file.is_file():  # a pipe would never end
            raise ViewError(f"{file}: is no regular file; remove it, or leave the step out with --steps")
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):  # it is still being written
                    break
                try:
                    packed.add(json.loads(line), file.name)
                except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
                    raise ViewError(
                        f"{file}, line {number}: is no sample that rlx wrote ({type(error).__name__}: {str(error)[:200]}); "
                        "delete the line, or leave the step out with --steps"
                    ) from None
    packed.finish()
    metrics = read_metrics(run / METRICS_FILE) if os.path.lexists(run / METRICS_FILE) else {}
    index = {
        "samples": packed.columns,
        "scale": {"advantage": packed.largest_advantage or 1.0, "gap": min(packed.largest_gap, LARGEST_GAP) or 1.0},
        "metrics": {step: {name: _short(value) for name, value in row.items()} for step, row in metrics.items()},
        "left_out": packed.left_out,
        "timeline": pictures(timeline),
    }
    name = printable(" / ".join(run.resolve().parts[-2:]))
    if os.path.lexists(out) and not (out.is_symlink() or out.is_file()):
        raise ViewError(f"{out}: is there and is no regular file; name another page with --out")
    with storing(out, "view again"), replacing_file(out) as page:
        page.writelines(_parts(name, index, packed.blocks))
    return Page(len(chosen), len(packed.columns["step"]), packed.left_out)


def _transcripts(run: Path, first: int | None, last: int | None, may_lack: bool) -> dict[int, Path]:
    """Return the files of steps from `first` to `last`, both included, in order; raise ViewError if there are none.

    A run `may_lack` transcripts altogether if there is something else to show.
    """
    folder = run / "transcripts"
    if not run.is_dir():
        raise ViewError(f"{run}: no such folder; name that of a run, which the run's first lines show")
    found = {int(match[1]): file for file in folder.glob("*.jsonl") if (match := _NAME.fullmatch(file.name))}
    if not found and may_lack:
        return {}
    if not found:
        raise ViewError(
            f"{folder}: got no step_*.jsonl, expected one per step. A run with an environment writes them, others with "
            f"trainer.transcripts=True; train again with that key behind the run's others: {program('train')} trainer.transcripts=True"
        )
    low, high = (min(found) if first is None else first), (max(found) if last is None else last)
    chosen = {step: found[step] for step in sorted(found) if low <= step <= high}
    if not chosen:
        raise ViewError(
            f"--steps: got {first}:{last}, expected some of the steps {min(found)} to {max(found)} of {run}"
        )
    return chosen


class _Packed:
    """Samples as columns of the list and as blocks of tokens."""

    def __init__(self, most_bytes: int) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.blocks: list[str] = []
        self.largest_advantage = self.largest_gap = 0.0
        self.left_out = 0
        self._rows: list[str] = []  # of the block that is being filled
        self._row_bytes = self._raw = self._used = 0
        self._limit = most_bytes

    def begin_step(self, limit: int) -> None:
        """From now on, all blocks together may have this many bytes."""
        self.finish()
        self._limit = limit

    def add(self, sample: Sample, file: str) -> None:
        _require_places(sample)
        row = json.dumps(_tokens(sample), separators=(",", ":"))
        share = self._used / self._raw if self._raw else FIRST_GUESS  # that packing leaves
        fits = self._used + (self._row_bytes + len(row)) * share <= self._limit
        self.left_out += not fits
        place = (len(self.blocks), len(self._rows)) if fits else (-1, 0)
        for name, value in zip(_COLUMNS, (*_summary(sample), file, *place), strict=True):
            self.columns[name].append(value)
        for name, largest in (("advantages", "largest_advantage"), ("log_prob_gap", "largest_gap")):
            found = (abs(value) for value in sample[name] if value is not None and math.isfinite(value))
            setattr(self, largest, max(getattr(self, largest), max(found, default=0.0)))
        if fits:
            self._rows.append(row)
            self._row_bytes += len(row)
            if self._row_bytes >= BLOCK_BYTES:
                self.finish()

    def finish(self) -> None:
        """Pack the rows that wait."""
        if self._rows:
            self.blocks.append(_compressed(f"[{','.join(self._rows)}]"))
            self._used += len(self.blocks[-1])
            self._raw += self._row_bytes
            self._rows, self._row_bytes = [], 0


_COLUMNS = (
    *("step", "group", "sample", "branch", "source", "reward", "tokens", "trained", "turns"),
    *("calls", "failed", "seconds", "reason", "title", "file", "block", "at"),
)


def _require_places(sample: Sample) -> None:
    """Raise ValueError for what the page would show in a wrong place, without an error of its own."""
    lengths = {name: len(sample[name]) for name in OF_TOKENS}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"got lists of {lengths} entries, expected as many as tokens")
    for name in ("step", "group", "sample", "branch"):
        value = sample.get(name, 0)
        if type(value) is not int or not 0 <= value < LARGEST:
            raise ValueError(f"{name}: got {value!r:.40}, expected a whole number from 0 on")
    turns, end = sample["turns"], lengths["tokens"]
    if not isinstance(turns, list) or not all(isinstance(turn.get("calls") or [], list) for turn in turns):
        raise TypeError("turns or their calls: expected lists")
    for turn in turns:
        if not 0 <= turn["start"] <= turn["end"] <= end:
            raise ValueError(
                f"a turn: got tokens {turn['start']} to {turn['end']}, expected a part of the {end} tokens"
            )


def _summary(sample: Sample) -> tuple[Any, ...]:
    """Return the entries of the list for a sample, those of _COLUMNS up to `title`."""
    turns = sample["turns"]
    calls = [call for turn in turns for call in turn.get("calls") or ()]
    own = [turn for turn in turns if turn["role"] == "assistant"]
    return (
        sample["step"],
        sample["group"],
        sample["sample"],
        sample.get("branch", 0),
        str(sample.get("data_source") or ""),
        _short(sample.get("reward")),
        len(sample["tokens"]),
        sum(map(bool, sample["loss_mask"])),
        len(own),
        len(calls),
        sum(bool(call.get("error")) for call in calls if isinstance(call, dict)),
        _short(sum(turn.get("seconds") or 0.0 for turn in turns)),
        str(sample.get("reason") or ""),
        _title([" ".join(str(turn.get("text") or "").split()) for turn in own]),
    )


def _title(texts: Sequence[str]) -> str:
    """Return all turns if they are short, such as guesses or moves, else the beginning of the last one."""
    whole = " → ".join(texts)
    return whole if len(whole) <= TITLE_LENGTH else texts[-1][:TITLE_LENGTH]


def _tokens(sample: Sample) -> dict[str, Any]:
    """Return the entries of a block for a sample."""
    turns = [
        {**turn, "text": None, "seconds": _short(turn.get("seconds")), "reward": _short(turn.get("reward"))}
        for turn in sample["turns"]
    ]
    return {
        "ids": sample["token_ids"],
        "tokens": sample["tokens"],
        "mask": [int(bool(own)) for own in sample["loss_mask"]],
        "advantages": [_short(value) for value in sample["advantages"]],
        "gaps": [_short(value) for value in sample["log_prob_gap"]],
        "turns": turns,
        "numbers": " · ".join(f"{name} {_short(value)}" for name, value in sample.get("numbers", {}).items()),
        "traceback": str(sample.get("traceback") or ""),
    }


def printable(text: str) -> str:
    """Return a name of the file system in characters that can be written; others become their numbers."""
    return text.encode("utf-8", "backslashreplace").decode()


def _short(value: float | None) -> float | str | None:
    """Round a number to SHOWN_DIGITS significant digits; JSON has no inf and nan, so these become text."""
    if value is None:
        return None
    return float(f"{value:.{SHOWN_DIGITS}g}") if math.isfinite(value) else str(value)


def _compressed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")


def _parts(name: str, index: dict[str, Any], blocks: Iterable[str]) -> Iterator[str]:
    """Yield the page piece by piece."""
    style, script, body = (
        files("rlx.view").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html")
    )
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    yield (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">\n'
        f"<style>{style}</style></head>\n<body>{body.replace('{name}', html.escape(name))}\n"
    )
    yield f'<script type="text/plain" id="index">{_compressed(json.dumps(index, separators=(",", ":")))}</script>\n'
    for number, block in enumerate(blocks):
        yield f'<script type="text/plain" id="block{number}">{block}</script>\n'
    yield f"<script>{script}</script></body></html>\n"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
