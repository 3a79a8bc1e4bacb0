"""Read transcripts of a run: a sample per line of `<run>/transcripts/step_<N>.jsonl`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.errors import ExplainedError
from rlx.program import program

Sample = dict[str, Any]
OF_TOKENS = ("token_ids", "tokens", "loss_mask", "advantages", "log_prob_gap")
"""The lists of a sample with an entry per token."""
_NAME = re.compile(r"step_([0-9]{1,15})\.jsonl")


class ViewError(ExplainedError, ValueError):
    """A run has nothing to show, or a file of it cannot be read."""


def transcript_files(run: Path, first: int | None, last: int | None, may_lack: bool = False) -> dict[int, Path]:
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
    chosen = {
        step: found[step]
        for step in sorted(found)
        if (first is None or step >= first) and (last is None or step <= last)
    }
    if not chosen:
        raise ViewError(
            f"--steps: got {first}:{last}, expected some of the steps {min(found)} to {max(found)} of {run}"
        )
    return chosen


def samples_of(file: Path) -> Iterator[Sample]:
    """Yield the samples of a file. A last line without a line break is left out, because it is still being written.

    Raises ViewError: it is no file, or a line is no sample.
    """
    if not file.is_file():  # a pipe would never end
        raise ViewError(f"{file}: is no regular file; remove it, or leave the step out with --steps")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                sample = json.loads(line)
                fault = _fault(sample)
            except (ValueError, TypeError, RecursionError) as error:
                fault = f"is no sample ({error})"
            if fault:
                raise ViewError(f"{file}, line {number}: {fault}; delete the line, or leave the step out with --steps")
            yield sample


def _fault(sample: Any) -> str | None:
    if not isinstance(sample, dict):
        return f"got {type(sample).__name__}, expected an object"
    if missing := [name for name in ("step", "group", "sample", "turns", *OF_TOKENS) if name not in sample]:
        return f"lacks {', '.join(missing)}"
    lengths = {name: len(sample[name]) for name in OF_TOKENS}
    if len(set(lengths.values())) > 1:
        return f"got lists of {lengths} entries, expected as many as tokens"
    return None
