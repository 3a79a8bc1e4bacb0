"""Nested arguments and results of layers: the leaves of tuples, lists, deques, mappings and dataclasses.

Containers keep their type and identity: one dict that is passed twice is one dict in the copy as well.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

_EMPTY = frozenset({type(None), bool, int, float, str})  # common types of leaves without tensors
_LEAVES = _EMPTY | {Tensor, Parameter}


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested values with `function` applied once to each leaf; not to numbers, strings and None."""
    if type(value) in _LEAVES:
        return value if type(value) in _EMPTY else function(value)
    tensors: list[Any] = []
    others: list[Any] = []
    sort_leaves((value,), tensors, others)
    leaves = {id(leaf): leaf for leaf in (*tensors, *others)}
    return replace_leaves(value, {key: function(leaf) for key, leaf in leaves.items()})


def replace_leaves(value: Any, by_id: Mapping[int, Any]) -> Any:
    """Return a copy of nested values in which leaves are replaced by their id.

    Lists, deques, dicts and dataclasses are copied in any case, since a layer may write to them. Other mappings are copied
    if a leaf in them is replaced: a read-only configuration of OmegaConf stays itself.
    """
    return _replace(value, dict(by_id), [])


def _replace(value: Any, by_id: dict[int, Any], held: list[Any]) -> Any:
    """As `replace_leaves`; adds containers' copies to `by_id` and the containers to `held`, so that no other gets their id."""
    kind = type(value)
    if id(value) in by_id:
        return by_id[id(value)]
    if kind in _LEAVES or (items := _items(value)) is None:
        return value
    held.append(value)
    if isinstance(value, tuple):
        copies = [item if type(item) in _EMPTY else _replace(item, by_id, held) for item in value]
        # Without its own __new__: that of PackedSequence checks what it is given.
        same = by_id[id(value)] = tuple.__new__(kind, copies)
        if kind is not tuple:
            getattr(same, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return same
    is_config = isinstance(value, MutableMapping) and not isinstance(value, dict | UserDict)
    same = by_id[id(value)] = value if is_config else copy.copy(value)  # before its items: it may contain itself
    for key, item in items:
        new = item if type(item) in _EMPTY else _replace(item, by_id, held)
        if new is item:
            continue
        if same is value:
            same = by_id[id(value)] = copy.copy(value)
        if isinstance(same, list | deque | MutableMapping):
            same[key] = new
        else:
            object.__setattr__(same, key, new)  # a frozen dataclass
    return same


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container by their index, key or name; None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return enumerate(value)
    if kind is dict:
        return value.items()  # type: ignore[no-any-return]
    if isinstance(value, Tensor):
        return None
    if isinstance(value, list | deque) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return enumerate(value)
    if isinstance(value, MutableMapping):  # OrderedDict, transformers' ModelOutput and BatchEncoding
        return _readable_items(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return (
            (name, getattr(value, name)) for name in names if hasattr(value, name)
        )  # `field(init=False)` may be unset
    return None


def _readable_items(value: MutableMapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key in value:
        with contextlib.suppress(Exception):  # OmegaConf raises for a value that is missing
            yield key, value[key]


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
            seen[id(value)] = value  # held, since a mapping may make its values anew
            if kind is dict:
                _sort(value.values(), tensors, others, seen)
            elif (items := _items(value)) is not None:
                _sort((item for _, item in items), tensors, others, seen)
            elif isinstance(value, Tensor):
                tensors.append(value)
            else:
                others.append(value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, deques, mappings and dataclasses."""
    tensors: list[Tensor] = []
    sort_leaves((value,), tensors, [])
    return tensors
