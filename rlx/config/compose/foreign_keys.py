"""Remedies for keys and values of verl and TRL that rlx does not have: `foreign_keys.yaml` holds them."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlx.config.schema.tree import is_key

IGNORED = ""
"""The remedy for what has no effect here."""


class Renamed(NamedTuple):
    """What rlx calls a key or a value: see `foreign_keys.yaml`."""

    to: str
    why: str = ""
    given: str = "={value}"

    def text(self, key: str, value: str = "") -> str:
        return f"use {key}{self.given.format(value=value) if value else ''}{self.why and f': {self.why}'}"


Remedy = str | Renamed


@cache
def remedies() -> dict[str, dict[str, Remedy]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    found = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: {key: _remedy(key, row) for row in rows for key in row["keys"]} for name, rows in found.items()}


def _remedy(key: str, row: dict[str, Any]) -> Remedy:
    if row.get("ignore"):
        return IGNORED
    if "remove" in row:
        return f"remove it: {row['remove']}".replace("{name}", key.rpartition(".")[2])
    return str(row["say"]) if "say" in row else Renamed(row["use"], row.get("why", ""), row.get("given", "={value}"))


def remedy_for(text: str) -> Remedy | None:
    """Return the remedy for a key, or key=value, of verl that rlx does not have, with rlx's whole key; None for any other."""
    known, padded = remedies()["verl"], f".{text}."
    pattern = max((each for each in known if f".{each}." in padded), key=len, default=None)
    if pattern is None:
        return None
    remedy = known[pattern]
    if isinstance(remedy, str) or "=" in pattern:
        return remedy
    before, _, below = padded.partition(f".{pattern}.")
    return remedy._replace(to=_whole_key(before.strip("."), f"{remedy.to}.{below}".strip(".")))


def remedy_of_trl(name: str, value: str) -> Remedy | None:
    """Return the remedy for a key of TRL, without a prefix, and this value; None if TRL has no such key."""
    known = remedies()["trl"]
    remedy = known.get(f"{name}={value}", known.get(name))
    return remedy.replace("{value}", value) if isinstance(remedy, str) else remedy


def _whole_key(section: str, name: str) -> str:
    """Return the key of this name in the section, or in the nearest group above it; the name alone if there is none."""
    groups = section.split(".")
    keys = [".".join([*groups[:depth], name]) for depth in range(len(groups), 0, -1)]
    return next(filter(is_key, keys), name)
