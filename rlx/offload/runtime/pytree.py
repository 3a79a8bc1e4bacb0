"""Leaves of nested arguments: tuples, lists, deques, mappings and dataclasses, which keep type and identity when copied."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

_EMPTY = frozenset({type(None), bool, int, float, str})  # common types of leaves without tensors
_LEAVES = _EMPTY | {Tensor, Parameter}


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested values with `function` applied once to each leaf; not to numbers, strings and None."""
    return function(value) if type(value) is Tensor else _replace(value, {}, [], function)


def replace_leaves(value: Any, by_id: Mapping[int, Any]) -> Any:
    """Return a copy of nested values, to which a layer may write, in which leaves are replaced by their id."""
    return _replace(value, dict(by_id), [], None)


def _replace(value: Any, by_id: dict[int, Any], held: list[Any], function: Callable[[Any], Any] | None) -> Any:
    """As `map_leaves`, or without a function as `replace_leaves`. Adds results to `by_id`, and the objects they replace to `held`, so that no other object gets the same id."""
    kind, key = type(value), id(value)
    same: Any
    if kind in _EMPTY:
        return value
    if key in by_id:
        return by_id[key]
    if kind is tuple:
        held.append(value)
        copies = [by_id[id(item)] if id(item) in by_id else _replace(item, by_id, held, function) for item in value]
        by_id[key] = same = tuple(copies)
        return same
    # Of containers that may contain themselves the copy is made before those of the items.
    if kind is dict or kind is list:
        held.append(value)
        same = by_id[key] = kind(value)
        for name, item in value.items() if kind is dict else enumerate(value):
            if type(item) not in _EMPTY:
                same[name] = by_id[id(item)] if id(item) in by_id else _replace(item, by_id, held, function)
        return same
    if kind in _LEAVES or (items := _items(value)) is None:
        if function is None:
            return value
        held.append(value)
        same = by_id[key] = function(value)
        return same
    held.append(value)
    if isinstance(value, tuple):
        # Without its own __new__: that of PackedSequence checks the items.
        same = by_id[key] = tuple.__new__(kind, [_replace(item, by_id, held, function) for _, item in items])
        getattr(same, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return same
    same = by_id[key] = copy.copy(value)
    for name, item in items:
        new = _replace(item, by_id, held, function)
        if new is item:
            continue
        if isinstance(same, list | deque | dict | UserDict):
            same[name] = new
        else:
            object.__setattr__(same, name, new)  # a frozen dataclass
    return same


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container other than a plain tuple or dict, by their index, key or name; None for a leaf."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, list | deque) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return enumerate(value)
    if isinstance(value, dict | UserDict):  # OrderedDict, transformers' ModelOutput and BatchEncoding
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        # One with `field(init=False)` may be unset.
        return ((name, getattr(value, name)) for name in names if hasattr(value, name))
    return None


def sort_leaves(values: Iterable[Any], tensors: list[Tensor], others: list[Any]) -> None:
    """Append the leaves of nested values to `tensors` or to `others`; skip numbers, strings and None."""
    _sort(values, tensors, others, {})


def _sort(values: Iterable[Any], tensors: list[Tensor], others: list[Any], seen: dict[int, Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            tensors.append(value)
        elif kind in _EMPTY:
            continue
        elif kind is tuple:
            _sort(value, tensors, others, seen)
        elif id(value) not in seen:
            seen[id(value)] = value  # held, since a mapping may create new values
            if kind is dict:
                _sort(value.values(), tensors, others, seen)
            elif (items := _items(value)) is not None:
                _sort((item for _, item in items), tensors, others, seen)
            elif isinstance(value, Tensor):
                tensors.append(value)
            else:
                others.append(value)


def tensors_in(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    sort_leaves((value,), tensors, [])
    return tensors
