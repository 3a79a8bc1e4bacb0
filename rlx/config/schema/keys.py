"""Declare one key of the typed tree: default, meaning, choices, range."""

import math
from dataclasses import field
from typing import Any, NamedTuple


class KeyInfo(NamedTuple):
    """Meaning and limits of one key. Choices and range of a tuple apply to each element.

    `bounds` marks a str for `read_bounds`; a user may also give a number. `words` are strings allowed instead of a number.
    `joined` marks a str for which a list may be given, joined by commas; `is_path` one that becomes a path, or part of one.
    """

    doc: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
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


def key(default: Any, doc: str, **limits: Any) -> Any:
    """Return a leaf of the tree; `limits` are fields of KeyInfo. Ranges include their ends unless named exclusive; None passes."""
    info = KeyInfo(doc, **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"key": info})
    return field(default=default, metadata={"key": info})


def group(cls: type, doc: str, **defaults: Any) -> Any:
    """Return a subtree; `defaults` replace the class's own at this point of the tree."""
    return field(default_factory=lambda: cls(**defaults), metadata={"key": KeyInfo(doc)})
