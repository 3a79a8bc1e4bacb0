"""Arguments of a layer that may hold tensors of which pytree knows nothing; a recomputation sees them as they were."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rlx.offload.recompute.noted_value import NOTED, fill, noted_attribute, restore
from rlx.offload.runtime.pytree import sort_leaves, tensors_in


class ArgumentObjects:
    """Arguments of a layer that are neither tensors nor numbers: modules, random generators, and objects of the user's own classes.

    A layer may replace the tensors in an object: `state.x = y`. So their attributes count as inputs, with the tensors in
    containers among them, and so do the elements of a deque or set. The same holds for the objects in these attributes:
    `state.layers[0].x = y`. Objects further inside are not looked at.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        unique = {id(leaf): leaf for leaf in leaves}
        given = (leaf for leaf in unique.values() if isinstance(leaf, nn.Module))
        self.modules = list({id(module): module for leaf in given for module in leaf.modules()}.values())
        self._generators = [noted_attribute(leaf) for leaf in unique.values() if isinstance(leaf, torch.Generator)]
        outer = [place for leaf in unique.values() for place in _places(leaf)]
        found: list[Any] = []
        for place in outer:
            sort_leaves(place.values() if isinstance(place, MutableMapping) else tuple(place), [], found)
        inner = {id(leaf): leaf for leaf in found if id(leaf) not in unique}
        self._places = outer + [place for leaf in inner.values() for place in _places(leaf)]

    def contents(self) -> list[Any]:
        """Return what the objects hold."""
        return [
            {name: value for name, value in place.items() if _is_content(value)}
            if isinstance(place, MutableMapping)
            else list(place)
            for place in self._places
        ]

    @contextlib.contextmanager
    def restored(self, contents: list[Any]) -> Iterator[None]:
        """Enclose a recomputation: the objects hold what `contents` returned."""
        before: list[Any] = [
            dict(place) if isinstance(place, MutableMapping) else list(place) for place in self._places
        ]
        undo: list[Callable[[], Any]] = []
        try:
            for generator in self._generators:
                generator.restore({}, "", undo)
            for place, was, noted in zip(self._places, before, contents, strict=True):
                if isinstance(place, MutableMapping):
                    restore(place, was, noted, undo)
                else:
                    fill(place, noted)
            yield
        finally:
            for place, was in zip(self._places, before, strict=True):
                fill(place, was)
            for function in undo:
                function()


class _Slots(MutableMapping[str, Any]):
    """The attributes that an object keeps in slots, as `vars` returns others."""

    def __init__(self, held: Any, names: list[str]) -> None:
        self._held = held
        self._names = names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._held, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._held, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._held, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if hasattr(self._held, name)])

    def __len__(self) -> int:
        return len(list(iter(self)))


def _places(leaf: Any) -> Iterator[Any]:
    """Yield where an object keeps what it holds: itself if it is a deque or set, the dict of its attributes, its slots."""
    if isinstance(leaf, deque | set):
        yield leaf
    if isinstance(leaf, nn.Module | ModuleType | type | Tensor):
        return
    if type(attributes := getattr(leaf, "__dict__", None)) is dict:
        yield attributes
    kinds = [vars(kind) for kind in type(leaf).__mro__ if "__slots__" in vars(kind)]
    names = [name for kind in kinds for name, value in kind.items() if type(value) is MemberDescriptorType]
    if names:
        yield _Slots(leaf, names)


def _is_content(value: Any) -> bool:
    """Whether an attribute is noted: one of a simple type, a list, tuple, dict or deque, or what else has tensors in it."""
    return type(value) in NOTED or isinstance(value, list | tuple | dict | deque) or bool(tensors_in(value))
