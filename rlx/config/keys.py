"""How one key of the typed tree is written down: default, meaning, choices, range."""

from dataclasses import field
from typing import Any, NamedTuple


class KeyInfo(NamedTuple):
    """What is known of one key beside its type and default. Of a tuple, choices and range hold for each element."""

    doc: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None


def key(default: Any, doc: str, **limits: Any) -> Any:
    """A leaf of the tree; `limits` are KeyInfo's. Ranges are inclusive unless they say otherwise, and not for None."""
    info = KeyInfo(doc, **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"key": info})
    return field(default=default, metadata={"key": info})


def group(cls: type, doc: str, **defaults: Any) -> Any:
    """A subtree, with `defaults` in place of the class's own where this place in the tree differs."""
    return field(default_factory=lambda: cls(**defaults), metadata={"key": KeyInfo(doc)})
