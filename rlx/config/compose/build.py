"""Build the frozen tree from plain dictionaries, collect every fault and guess no value.

Remedies for keys and values of verl and TRL that rlx does not have are in `foreign_keys.yaml`.
"""

import math
import re
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml

from rlx.config.faults import Fault
from rlx.config.schema import PPOConfig
from rlx.config.schema.keys import KeyInfo, read_bounds
from rlx.config.schema.tree import LEAVES, Leaf, as_text, children, describe_expected, is_key, plain_type, section_in
from rlx.config.secrets import override_without_secrets, without_secrets
from rlx.errors import did_you_mean

MISSING = "???"  # in a YAML file: the user must give this value
IN_WORDS = {int: "a whole number", float: "a number, such as 0.5 or 1e-6", bool: "True or False", str: "a text"}
LONGEST_PATH, LONGEST_NAME = 3000, 255  # bytes; Linux takes paths of 4,095, and a run adds folders of its own
SHOWN = 60  # letters of a text that is too long
GENERIC = ("enable", "mode", "name", "path")
"""Last words that many groups share: alone they do not show which key is meant."""
TORCH_DTYPES = {
    **{"bfloat16": "bf16", "half": "fp16", "float": "fp32"},
    **{f"float{bits}": f"fp{bits}" for bits in (16, 32, 64)},
}
"""Torch's name of a type, in which verl's commands are written -> the name here."""


# Keys of verl and TRL

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
    text = Path(__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8")
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


# The tree


def build(tree: dict[str, Any]) -> tuple[PPOConfig, list[Fault]]:
    """Return the typed tree of a nested dictionary, and a fault for each key that could not be read.

    Such a key keeps its default, as a missing one does. Only an unknown choice is kept, so that rules can add to its fault.
    """
    faults: list[Fault] = []
    return _section(PPOConfig(), tree, "", faults), faults


def nearest_keys(key: str) -> list[str]:
    """Return at most three known keys that a mistyped or misplaced key may mean, best first."""
    section, _, name = key.rpartition(".")
    words = section.rpartition(".")[2].split("_")
    same_name = [known for known in LEAVES if known.rpartition(".")[2] == name]
    if name in GENERIC:  # also a word of its group is like one of the known key's groups
        places = {known: re.split(r"[._]", known)[:-1] for known in same_name}
        alike = {known for known in places for word in words if get_close_matches(word, places[known], cutoff=0.75)}
        same_name = [known for known in same_name if known in alike]
    if same_name:
        return get_close_matches(key, same_name, n=3, cutoff=0.0)
    siblings = {known.rpartition(".")[2]: known for known in LEAVES if known.rpartition(".")[0] == section}
    if near := [siblings[match] for match in get_close_matches(name, siblings, n=2, cutoff=0.6)]:
        return near
    for known in get_close_matches(key, LEAVES, cutoff=0.75):
        # Long common groups make any two keys alike, so the rest below them is compared.
        one, other = key.split("."), known.split(".")
        while one and one[:1] == other[:1]:
            one, other = one[1:], other[1:]
        if get_close_matches(".".join(one), [".".join(other)]):
            return [known]
    return []


def not_a_group(key: str, value: Any, below: tuple[str, ...]) -> Fault:
    """Return the fault of a plain value given to a group, which holds the keys `below`."""
    got = override_without_secrets(f"{key}={as_text(value)}")
    return Fault(f"{key} is a group of keys", got, "a mapping", f"set keys below it, such as {below[0]}", below)


def _section(section: Any, given: dict[Any, Any], prefix: str, faults: list[Fault]) -> Any:
    known = children(section)
    changes: dict[str, Any] = {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        if name not in known and "[" in prefix:
            got = override_without_secrets(f"{key}={as_text(value)}")
            remedy = did_you_mean(str(name), known, "remove it")
            faults.append(Fault(f"unknown key {key}", got, f"one of {', '.join(known)}", remedy, (key,)))
        elif name not in known:
            _unknown(key, value, faults)
        elif (each := section_in(known[name].hint)) and isinstance(value, list) and {*map(type, value)} <= {dict}:
            parts = enumerate(value)
            changes[name] = tuple(_section(each(), part, f"{key}[{place}].", faults) for place, part in parts)
        elif not is_dataclass(known[name].default):
            changes[name] = _leaf(key, value, known[name], faults)
        elif isinstance(value, dict):
            changes[name] = _section(known[name].default, value, f"{key}.", faults)
        else:
            faults.append(not_a_group(key, value, tuple(leaf for leaf in LEAVES if leaf.startswith(f"{key}."))))
    return replace(section, **changes)


def _unknown(key: str, value: Any, faults: list[Fault]) -> None:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            _unknown(f"{key}.{name}", child, faults)
        return
    given = override_without_secrets(f"{key}={as_text(value)}").partition("=")[2]
    name, found, meant = key.rpartition(".")[2], remedy_for(key), list[str]()
    # TRL writes keys without a prefix; below one that is wrong here no key is like it.
    if found is None and (name == key or not nearest_keys(key)):
        found = remedy_of_trl(name, given)
    if found == IGNORED or (found is not None and value is None):
        return
    expected = "a key of rlx"
    if isinstance(found, Renamed):
        remedy, meant = _renamed(found, value)
    elif found is not None:
        remedy = found
    else:
        meant = nearest_keys(key)
        expected = " or ".join(meant) or "a key that docs/configuration.md lists"
        remedy = f"did you mean {expected}?" if meant else "remove it, or look for its name in docs/configuration.md"
    # Faults of rules about the keys that the user meant would only add noise.
    got = f"{key}={given}"
    faults.append(Fault(f"unknown key {key}", got, expected, remedy, (key, *meant)))


def _renamed(found: Renamed, value: Any) -> tuple[str, list[str]]:
    """Return the remedy for a key that has another name here, and the keys that it sets if obeyed."""
    key, misfits = found.to, list[Fault]()
    if not is_key(key):
        return f"remove it: rlx has no {key}", []
    if isinstance(value, float) and value.is_integer() and key in LEAVES and plain_type(LEAVES[key].hint)[0] is int:
        value = int(value)
    if key in LEAVES:
        _leaf(key, value, LEAVES[key], misfits)
    if not misfits:
        return found.text(key, override_without_secrets(f"{key}={as_text(value)}").partition("=")[2]), [key]
    if remedy_for(f"{key}={value}"):
        return misfits[0].remedy, [key]
    return f"remove it, or {found.text(key)}", []


def _leaf(key: str, value: Any, leaf: Leaf, faults: list[Fault]) -> Any:
    expected = describe_expected(leaf)
    if leaf.info.choices is not None and "bf16" in leaf.info.choices and isinstance(value, str):
        value = TORCH_DTYPES.get(value.removeprefix("torch."), value)
    if value == MISSING:
        faults.append(Fault(f"{key} has no value", "nothing", expected, f"add {key}=...", (key,)))
        return leaf.default
    try:
        read = value if value in leaf.info.words else _convert(value, leaf.hint, leaf.info)
    except TypeError:
        got, remedy = f"{without_secrets(value)!r} ({type(value).__name__})", f"set {key}{_example(value, leaf)}"
        faults.append(Fault(f"{key} has the wrong type", got, expected, remedy, (key,)))
        return leaf.default
    for item in read if isinstance(read, tuple) else (read,):
        if isinstance(item, str) and (wrong := _unusable(leaf.info, item)):
            faults.append(Fault(f"{key} {wrong[0]}", wrong[1], wrong[2], f"shorten or correct {key}", (key,)))
            return leaf.default
    if not _allowed(read, leaf):
        remedy = _other_choice(key, read, leaf)
        faults.append(Fault(f"{key} has an invalid value", repr(value), expected, remedy, (key,)))
        return read if leaf.info.choices is not None else leaf.default
    return read


def _other_choice(key: str, read: Any, leaf: Leaf) -> str:
    """Return the remedy for a value that is not allowed: what rlx calls verl's value, else the nearest, else the default."""
    choices = list(map(str, leaf.info.choices or ()))
    given = list(map(str, read if isinstance(read, tuple) else (read,)))
    answers = [remedy_for(f"{key}={each}") for each in given]
    if texts := [answer for answer in answers if isinstance(answer, str)]:
        return "; ".join(texts)
    renamed = {each: answer for each, answer in zip(given, answers, strict=True) if isinstance(answer, Renamed)}
    near = {each: get_close_matches(each.lower(), choices, n=1) for each in given}
    names = [[each] if each in choices else [renamed[each].to] if each in renamed else near[each] for each in given]
    if not all(names):
        return f"set {key}={as_text(leaf.default)} (the default), or another value that is allowed"
    allowed = as_text([name for (name,) in names]) if isinstance(read, tuple) else names[0][0]
    why = "; ".join(answer.why for answer in renamed.values() if answer.why)
    return Renamed(key, why).text(key, allowed) if renamed else f"did you mean {key}={allowed}?"


def _convert(value: Any, hint: Any, info: KeyInfo) -> Any:
    """Return the value in the key's type. Raises TypeError if it has another type.

    For a list a str becomes its only entry, or is split at commas if no entry can contain one. For bounds a number becomes text.
    """
    kind, optional = plain_type(hint)
    if info.bounds and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(float(value))
    if value is None and optional:
        return None
    if get_origin(kind) is tuple:
        element = get_args(kind)[0]
        items = value
        if isinstance(value, str) and element is str:
            items = [part.strip() for part in value.split(",")] if info.choices or info.bounds else [value]
        if not isinstance(items, list):
            raise TypeError
        return tuple(_convert(item, element, info) for item in items)
    if info.joined and isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise TypeError
        return {str(name): child for name, child in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError
    return value


def _allowed(value: Any, leaf: Leaf) -> bool:
    info = leaf.info
    if isinstance(value, tuple):
        return info.length in (None, len(value)) and all(_allowed(item, leaf) for item in value)
    if info.choices is not None:
        return value in info.choices
    if info.bounds and isinstance(value, str):
        try:
            return bool(read_bounds(value))
        except ValueError:
            return False
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    return (
        math.isfinite(value)
        and (info.minimum is None or value >= info.minimum)
        and (info.maximum is None or value <= info.maximum)
        and (info.above is None or value > info.above)
        and (info.under is None or value < info.under)
    )


def _unusable(info: KeyInfo, text: str) -> tuple[str, str, str] | None:
    """Return what is wrong with a text, what was given and what is expected, if no file can have this name or no YAML hold it."""
    try:
        raw = text.encode()
        if info.is_path:
            Path(text).expanduser()
    except UnicodeEncodeError:
        return "is not UTF-8", ascii(text[:SHOWN]), "UTF-8"
    except RuntimeError:
        return "names the home of a user who does not exist", text, "a path"
    if info.is_path and (len(raw) > LONGEST_PATH or max(map(len, raw.split(b"/"))) > LONGEST_NAME):
        got = f"{text[:SHOWN]}… of {len(raw):,} bytes"
        return "is too long for a path", got, f"at most {LONGEST_PATH:,} bytes, and {LONGEST_NAME} between two slashes"
    return None


def _example(value: Any, leaf: Leaf) -> str:
    """Return `=value` with a value of the right type near the given one, else ` to ` and the type in words."""
    kind, _ = plain_type(leaf.hint)
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"={int(value)}"
    if kind in IN_WORDS:  # no default: beside the other keys it may be the next fault
        return f" to {IN_WORDS[kind]}"
    return f"={as_text(leaf.default)}, or another value of that type"
