"""Flatten the typed tree into dotted keys, and put a key's type into words."""

from dataclasses import fields, is_dataclass, replace
from functools import reduce
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from rlx.config.schema import PPOConfig
from rlx.config.schema.keys import KeyInfo

Section = TypeVar("Section")


class Leaf(NamedTuple):
    """One key: its type, its default at this point of the tree, and its meaning and limits."""

    hint: Any
    default: Any
    info: KeyInfo


def children(section: Any) -> dict[str, Leaf]:
    """Return the keys directly below a section (an instance of a class of the schema), including subsections."""
    return {f.name: Leaf(f.type, getattr(section, f.name), f.metadata["key"]) for f in fields(section)}


def leaves(section: Any = None, prefix: str = "") -> dict[str, Leaf]:
    """Return every leaf below a section by its dotted name, in the schema's order; by default of the whole tree."""
    found: dict[str, Leaf] = {}
    for name, child in children(PPOConfig() if section is None else section).items():
        if is_dataclass(child.default):
            found |= leaves(child.default, f"{prefix}{name}.")
        else:
            found[prefix + name] = child
    return found


LEAVES = leaves()
MAPPINGS = [key for key, leaf in LEAVES.items() if isinstance(leaf.default, dict)]


def is_key(key: str) -> bool:
    """Whether a dotted name is a key of rlx, or lies below one that takes a mapping."""
    return key in LEAVES or any(key.startswith(f"{leaf}.") for leaf in MAPPINGS)


def value_at(section: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), section)


def with_value(section: Section, key: str, value: Any) -> Section:
    name, _, below = key.partition(".")
    changed = with_value(getattr(section, name), below, value) if below else value
    return replace(section, **{name: changed})  # type: ignore[type-var]  # a section is a dataclass


def plain_type(hint: Any) -> tuple[Any, bool]:
    """Return the type without None and without `words`, and whether None is allowed."""
    if isinstance(hint, UnionType):
        return next(arg for arg in get_args(hint) if arg is not NoneType), NoneType in get_args(hint)
    return hint, False


def section_in(hint: Any) -> Any:
    """Return the class of which a key holds a list; None for keys of other types."""
    kinds = get_args(hint) if get_origin(hint) is tuple else ()
    return kinds[0] if kinds and is_dataclass(kinds[0]) else None


def describe_type(hint: Any) -> str:
    """Return the type in words: `int`, `list of str`, `int or null`."""
    bare, optional = plain_type(hint)
    if get_origin(bare) is tuple:
        text = f"list of {'mappings' if section_in(bare) else get_args(bare)[0].__name__}"
    elif get_origin(bare) is dict:
        text = "mapping"
    else:
        text = str(bare.__name__)
    return f"{text} or null" if optional else text


def describe_range(info: KeyInfo) -> str:
    """Return the choices or the range in words; empty if every value of the type is allowed."""
    if info.choices is not None:
        return "one of " + ", ".join("null" if choice is None else str(choice) for choice in info.choices)
    if info.bounds:
        return "a number > 0 or low_high"
    ends = ((">=", info.minimum), (">", info.above), ("<=", info.maximum), ("<", info.under))
    between = " and ".join(f"{sign} {end:.10g}" for sign, end in ends if end is not None)
    count = "" if info.length is None else f"{info.length} of them"
    return ", ".join(filter(None, (count, between, *(f"or {word}" for word in info.words))))


def describe_expected(leaf: Leaf) -> str:
    allowed = describe_range(leaf.info)
    kind = describe_type(leaf.hint)
    if not allowed:
        return kind
    return allowed if leaf.info.choices is not None and not kind.startswith("list") else f"{kind}, {allowed}"


def as_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(as_text(item) for item in value) + "]"
    return "null" if value is None else str(value)
