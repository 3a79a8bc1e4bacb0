"""Read transcripts of a run: a sample per line of `<run>/transcripts/step_<N>.jsonl`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.errors import ExplainedError
from rlx.program import program

Sample = dict[str, Any]
LARGEST = 1 << 53  # of whole numbers that a browser reads
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
            except (ValueError, RecursionError) as error:
                fault = f"is no JSON ({error})"
            if fault:
                raise ViewError(f"{file}, line {number}: {fault}; delete the line, or leave the step out with --steps")
            yield sample


def _is_number(value: Any) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _is_flag(value: Any) -> bool:
    return type(value) in (bool, int)


_ELEMENTS = {
    "token_ids": (_is_index, "token numbers"),
    "tokens": (lambda value: isinstance(value, str), "texts"),
    "loss_mask": (_is_flag, "0 or 1"),
    "advantages": (_is_number, "numbers or null"),
    "log_prob_gap": (_is_number, "numbers or null"),
}
"""What each list of a sample holds, an entry per token."""


def _fault(sample: Any) -> str | None:
    if not isinstance(sample, dict):
        return f"got {type(sample).__name__}, expected an object"
    missing = [name for name in ("step", "group", "sample", "turns", *_ELEMENTS) if name not in sample]
    if missing:
        return f"lacks {', '.join(missing)}"
    for name in ("step", "group", "sample", "branch"):
        if not _is_index(sample.get(name, 0)):
            return f"{name}: got {_short(sample[name])}, expected a whole number from 0 on"
    if not _is_number(sample.get("reward")):
        return f"reward: got {_short(sample['reward'])}, expected a number"
    numbers = sample.get("numbers", {})
    if not isinstance(numbers, dict) or not all(map(_is_number, numbers.values())):
        return f"numbers: got {_short(numbers)}, expected an object with numbers"
    for name, (is_right, expected) in _ELEMENTS.items():
        values = sample[name]
        if not isinstance(values, list) or not all(map(is_right, values)):
            return f"{name}: expected a list of {expected}"
    lengths = {name: len(sample[name]) for name in _ELEMENTS}
    if len(set(lengths.values())) > 1:
        return f"got lists of {lengths} entries, expected as many as tokens"
    if not isinstance(sample["turns"], list):
        return f"turns: got {_short(sample['turns'])}, expected a list"
    faults = (_fault_of_turn(turn, len(sample["tokens"])) for turn in sample["turns"])
    return next((f"turn {number}: {fault}" for number, fault in enumerate(faults) if fault), None)


def _fault_of_turn(turn: Any, tokens: int) -> str | None:
    if not isinstance(turn, dict):
        return f"got {type(turn).__name__}, expected an object"
    start, end = turn.get("start"), turn.get("end")
    if not (_is_index(start) and _is_index(end) and start <= end <= tokens):
        return f"got tokens {_short(start)} to {_short(end)}, expected a part of the {tokens} tokens"
    if not isinstance(turn.get("role"), str):
        return f"role: got {_short(turn.get('role'))}, expected a text"
    for name in ("seconds", "reward"):
        if not _is_number(turn.get(name)):
            return f"{name}: got {_short(turn[name])}, expected a number"
    if not isinstance(turn.get("calls") or [], list):
        return f"calls: got {_short(turn['calls'])}, expected a list"
    return None


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str | bool | float | None) else type(value).__name__
