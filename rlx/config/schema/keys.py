"""How one key of the typed tree is written down: default, meaning, choices, range."""

import math
from dataclasses import field
from typing import Any, NamedTuple


class KeyInfo(NamedTuple):
    """Meaning and limits of one key. Choices and range of a tuple hold for each element.

    `bounds` marks a str that `read_bounds` understands; it may be given as a number. `words` may stand in place of a number.
    """

    doc: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    bounds: bool = False
    words: tuple[str, ...] = ()


class Bounds(NamedTuple):
    """Limits of a value: at most `high`, and at least `low` unless that is None."""

    low: float | None
    high: float


def read_bounds(text: str) -> Bounds:
    """Reads `high` or `low_high`, numbers above 0 in ascending order. Raises ValueError."""
    numbers = [float(part) for part in text.split("_")]
    if len(numbers) > 2 or not all(0 < number < math.inf for number in numbers) or numbers != sorted(numbers):
        raise ValueError(f"bounds: got {text!r}, expected a number above 0, or two in ascending order such as 0.5_5.0")
    return Bounds(numbers[0] if len(numbers) == 2 else None, numbers[-1])


def key(default: Any, doc: str, **limits: Any) -> Any:
    """A leaf of the tree; `limits` are KeyInfo's. Ranges are inclusive unless they say otherwise, and not for None."""
    info = KeyInfo(doc, **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"key": info})
    return field(default=default, metadata={"key": info})


def group(cls: type, doc: str, **defaults: Any) -> Any:
    """A subtree, with `defaults` in place of the class's own where this place in the tree differs."""
    return field(default_factory=lambda: cls(**defaults), metadata={"key": KeyInfo(doc)})
