"""Declare one key of the typed tree: default, meaning, choices, range, and how it depends on other keys.

A key of another section is named in full, one beside it by its last word.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple


class Unused(NamedTuple):
    """A reason why a key has no effect: always, by another key's value, or in a state of `rlx.config.check.declared`."""

    why: str  # {key}: the other key
    key: str = ""
    holds: Callable[[Any], bool] = bool  # for the other key's value
    state: str = ""


def without(flag: str) -> Unused:
    """While the flag is False, null, 0 or empty."""
    return Unused("{key} is not set", flag, operator.not_)


def beside(number: str) -> Unused:
    """While another key, which replaces this one, is neither null nor -1."""
    return Unused("{key} is set", number, lambda value: value not in (None, -1))


def while_is(other: str, value: Any) -> Unused:
    return Unused(f"{{key}} is {'null' if value is None else value}", other, lambda found: found == value)


def unless(other: str, value: Any, why: str) -> Unused:
    return Unused(why, other, lambda found: found != value)


def never(why: str) -> Unused:
    return Unused(why)


def in_state(name: str) -> Unused:
    """While the run is in a state of `rlx.config.check.declared`."""
    return Unused("", state=name)


class Need(NamedTuple):
    """What a key, while it has certain values, needs of another key or of the machine."""

    what: str  # the fault otherwise
    key: str  # beside or in full; `role.…`: of the role's model, such as `role.fsdp.model_dtype`
    met: Callable[[Any], bool]  # by the other key's value
    expected: str  # what follows the other key in words, such as `=True`
    example: str  # a value to set; empty: the user knows
    when: Callable[[Any], bool]  # for the key's own value


def needs(
    what: str, other: str, *values: Any, when: Callable[[Any], bool] = bool, expected: str = "", example: Any = ""
) -> Need:
    """While `when` holds, by default while the key is set: the other key has one of these values, or any if there are none."""
    texts = ["null" if value is None else str(value) for value in values] or [""]
    met = (lambda found: found in values) if values else bool
    return Need(what, other, met, expected or f"={' or '.join(texts)}", str(example) or texts[0], when)


def is_above(least: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > least


class KeyInfo(NamedTuple):
    """Meaning and limits of one key. Choices and range of a tuple apply to each element.

    `bounds` marks a str for `read_bounds`; a user may also give a number. `words` are strings allowed instead of a number.
    `joined` marks a str for which a list may be given, joined by commas; `is_path` one that becomes a path, or part of one.
    """

    doc: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    under: float | None = None
    length: int | None = None  # of a tuple
    at_most: str = ""  # the key that holds the largest value
    divides: str = ""  # the key, or `processes` or `sampling processes`, that this one has to divide
    unused: tuple[Unused, ...] = ()
    needs: tuple[Need, ...] = ()
    package: str = ""  # of pip, that any other value than the default needs, or those of `package_for`
    package_for: tuple[Any, ...] = ()
    below: Mapping[str, tuple[Unused, ...]] | None = None  # of a group, for keys and groups in it
    bounds: bool = False
    words: tuple[str, ...] = ()
    joined: bool = False
    is_path: bool = False


class Bounds(NamedTuple):
    """Limits of a value: at most `high`, and at least `low` unless that is None."""

    low: float | None
    high: float


def read_bounds(text: str) -> Bounds:
    """Read `high` or `low_high`, numbers above 0 in ascending order. Raises ValueError."""
    numbers = [float(part) for part in text.split("_")]
    if len(numbers) > 2 or not all(0 < number < math.inf for number in numbers) or numbers != sorted(numbers):
        raise ValueError(f"bounds: got {text!r}, expected a number above 0, or two in ascending order such as 0.5_5.0")
    return Bounds(numbers[0] if len(numbers) == 2 else None, numbers[-1])


def key(default: Any, doc: str, *relations: Unused | Need, **limits: Any) -> Any:
    """Return a leaf of the tree; `limits` are fields of KeyInfo. Ranges include their ends unless named exclusive; None passes."""
    unused = tuple(each for each in relations if isinstance(each, Unused))
    info = KeyInfo(doc, unused=unused, needs=tuple(each for each in relations if isinstance(each, Need)), **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"key": info})
    return field(default=default, metadata={"key": info})


def group(
    cls: type, doc: str, *unused: Unused, below: Mapping[str, tuple[Unused, ...]] | None = None, **defaults: Any
) -> Any:
    """Return a subtree; `defaults` replace the class's own, and `below` adds to what its keys declare, at this point of the tree."""
    return field(default_factory=lambda: cls(**defaults), metadata={"key": KeyInfo(doc, unused=unused, below=below)})
