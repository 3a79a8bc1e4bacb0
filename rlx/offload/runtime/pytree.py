"""Nested arguments and results of layers: the leaves of tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

_EMPTY = frozenset({type(None), bool, int, float, str})  # common types of leaves without tensors
_LEAVES = _EMPTY | {Tensor, Parameter}


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested tuples, lists, mappings and dataclasses with `function` applied to each leaf."""
    kind = type(value)
    if kind in _LEAVES:
        return function(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, item) for item in value])
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(map_leaves(function, item) for item in value))
    if isinstance(value, MutableMapping):  # OrderedDict, transformers' ModelOutput and BatchEncoding
        copied = copy.copy(value)
        for key in value:
            copied[key] = map_leaves(function, value[key])
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(same, field.name, map_leaves(function, getattr(value, field.name)))
        return same
    return function(value)


def replace_leaves(value: Any, by_id: Mapping[int, Any]) -> Any:
    """Return a copy of nested values in which leaves are replaced by their id; faster than `map_leaves` if few are."""
    kind = type(value)
    if kind is tuple or kind is list:
        items = list(value)
        for index, item in enumerate(items):
            if id(item) in by_id:
                items[index] = by_id[id(item)]
            elif type(item) not in _LEAVES:
                items[index] = replace_leaves(item, by_id)
        return items if kind is list else tuple(items)
    if kind is dict:
        named = dict(value)
        for key, item in value.items():
            if id(item) in by_id:
                named[key] = by_id[id(item)]
            elif type(item) not in _LEAVES:
                named[key] = replace_leaves(item, by_id)
        return named
    return map_leaves(lambda leaf: by_id.get(id(leaf), leaf), value)


def sort_leaves(values: Iterable[Any], tensors: list[Tensor], others: list[Any]) -> None:
    """Append the leaves of nested values to `tensors` or to `others`; skip numbers, strings and None."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            tensors.append(value)
        elif kind in _EMPTY:
            continue
        elif kind is tuple or kind is list:
            sort_leaves(value, tensors, others)
        elif kind is dict:
            sort_leaves(value.values(), tensors, others)
        else:
            map_leaves(lambda leaf: (tensors if isinstance(leaf, Tensor) else others).append(leaf), value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, mappings and dataclasses."""
    tensors: list[Tensor] = []
    sort_leaves((value,), tensors, [])
    return tensors
