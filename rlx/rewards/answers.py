"""The form of a reward process's messages to the driver, which checks it. `rlx.processes.lines` carries them."""

import math
from collections.abc import Sequence
from typing import Any, get_args

from rlx.processes.lines import BadAnswer
from rlx.rewards.function import LARGEST_SCORE, Kind, Outcome
from rlx.user_code import ImportFailed, UserCodeError

_ERRORS = {each.__name__: each for each in (UserCodeError, ImportFailed)}

Loaded = tuple[bool, UserCodeError | None, str]
"""The answer to a request to load: whether the function is async, why it cannot be loaded, and the traceback."""


def of_loaded(loaded: Loaded) -> list[Any]:
    """Return the message."""
    asynchronous, fault, traceback = loaded
    return [asynchronous, None if fault is None else [type(fault).__name__, str(fault)], traceback]


def to_loaded(message: Any) -> Loaded:
    """Read the message. Raises BadAnswer."""
    match message:
        case [bool(asynchronous), None, str(traceback)]:
            return asynchronous, None, traceback
        case [bool(asynchronous), [str(name), str(text)], str(traceback)]:
            return asynchronous, _ERRORS.get(name, UserCodeError)(text), traceback
    raise BadAnswer("sent a wrong answer to a request to load")


def to_outcomes(message: Any, samples: Sequence[int], open_calls: set[int]) -> list[tuple[int, Outcome]]:
    """Read a list of [index of the call, *Outcome].

    Args:
        message: from the process.
        samples: of each call that it received.
        open_calls: indices of calls without an answer.

    Raises:
        BadAnswer: another form; or an answer to a call that was not asked or has one already.
    """
    found: dict[int, Outcome] = {}
    for record in message if isinstance(message, list) else [None]:
        match record:
            case [int(place), list(answers), str(kind), str(fault), str(traceback)] if (
                place in open_calls - found.keys()
                and kind in get_args(Kind)
                and len(answers) == (0 if kind else samples[place])
                and all(map(_is_answer, answers))
            ):
                found[place] = Outcome(answers, kind, fault, traceback)  # type: ignore[arg-type]
            case _:
                raise BadAnswer("sent an answer of another form than rlx's")
    return list(found.items())


def _is_answer(answer: Any) -> bool:
    if isinstance(answer, str):
        return True
    numbers = answer.values() if isinstance(answer, dict) else [None]
    return all(type(each) is float for each in numbers) and abs(answer.get("score", math.nan)) <= LARGEST_SCORE
