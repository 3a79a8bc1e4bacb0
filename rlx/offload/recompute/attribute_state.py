"""What modules hold at the start of a layer's forward, besides parameters: buffers, attributes and hooks.

A recomputation sees the same, and leaves no trace: afterwards each module holds what it held before the recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import is_
from typing import Any, TypeVar

from torch import Tensor, nn

from rlx.offload.recompute.noted_value import (
    BY_VALUE,
    MISSING,
    NOTED,
    SMALL_BYTES,
    Aliased,
    Copied,
    Kept,
    fill,
    is_sharded,
    noted_attribute,
    noted_buffer,
    restore,
    version_of,
)
from rlx.offload.storage.regions import size_bytes

# Names that torch gives each module, before all others; none of them is noted, so that most modules take no time.
_OF_TORCH = list(vars(nn.Module()))
# Modules whose forward reads no simple attributes, or that have no forward.
_WITHOUT = (
    nn.Linear,
    nn.Identity,
    nn.SiLU,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Sequential,
    nn.ParameterList,
    nn.ParameterDict,
)
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_FILLED = (list, dict)
_NOTHING: dict[str, Any] = {}
_T = TypeVar("_T")


def first_attribute(module: nn.Module) -> int:
    """Return how many of a module's attributes come before the first that is noted."""
    own = vars(module)
    if type(module) in _WITHOUT and Tensor not in map(type, own.values()):
        return len(own)  # one that is set later comes after them
    count = len(_OF_TORCH)
    return count if list(islice(own, count)) == _OF_TORCH else 0


class ModuleAttributes:
    """Buffers, attributes and hooks of modules at the start of a layer's forward (Note [attributes] in noted_value.py).

    Args:
        modules: the modules, and of each what `first_attribute` returns. The first is the layer, whose own hooks run
            outside of its recomputation.
        scripted: modules of TorchScript. Their small buffers get their values back; they have no Python attributes.
    """

    def __init__(self, modules: Sequence[tuple[nn.Module, int]], scripted: Iterable[nn.Module]) -> None:
        attributes = [module.__dict__ for module, _ in modules]
        buffers = [place["_buffers"] for place in attributes]
        self._places = [*attributes, *buffers]
        self._starts = [start for _, start in modules] + [0] * len(buffers)
        # Most have none of their own, and a layer with LoRA has 80 modules: no function is called for each.
        self._noted = {
            i: _attributes(m.__dict__, start) for i, (m, start) in enumerate(modules) if len(m.__dict__) > start
        }
        self._noted |= {i: _buffers(place) for i, place in enumerate(buffers, len(attributes)) if place}
        self._hooks = [  # a module's dict, and what it held
            (place[name], dict(place[name]))
            for place in attributes[1:]
            if place["_forward_pre_hooks"] or place["_forward_hooks"]
            for name in _HOOKS
            if place[name]
        ]
        self._scripted = [
            (name, noted)
            for module in scripted
            for name, tensor in module._buffers.items()
            if isinstance(noted := noted_buffer(tensor), Copied)
        ]

    def _of_type(self, kind: type[_T]) -> Iterator[tuple[int, str, _T]]:
        """Yield a place, a name in it and what was noted of it, for what was noted as `kind`."""
        for index, noted in self._noted.items():
            if kind in map(type, noted.values()):
                yield from [(index, name, each) for name, each in noted.items() if type(each) is kind]

    def end_forward(self) -> None:
        """Forward has ended; RuntimeError if it changed a buffer of which there is no copy."""
        for index, name, (tensor, version) in self._of_type(Kept):
            if self._places[index].get(name) is not tensor or version_of(tensor) != version:
                why = f"it has {size_bytes(tensor)} bytes (limit {SMALL_BYTES})"
                raise RuntimeError(
                    f"a layer's forward changes its buffer {name!r}, of which no copy was made because "
                    f"{why if size_bytes(tensor) >= SMALL_BYTES else 'its layout is not strided'}; recomputation would change "
                    "it a second time. Leave the layer out of layers=, or use enable_ckpt=False"
                )
        for index, name, noted in self._of_type(Aliased):
            if noted.is_large and self._places[index].get(name) is not noted.tensor():
                del self._noted[index][name]

    def changed(self) -> str | None:
        """Describe a buffer that has changed since forward and of which there is no copy; None if there is none."""
        for _, name, (tensor, version) in self._of_type(Kept):
            if version_of(tensor) != version:
                return f"its buffer {name!r} has been modified"
        return None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Enclose a recomputation: the modules hold what they held at the start of forward."""
        places, starts = self._places, self._starts
        before = {
            index: dict(islice(place.items(), start, None))
            for index, (place, start) in enumerate(zip(places, starts, strict=True))
            if len(place) > start
        }
        filled: list[tuple[Any, Any]] = []
        undo: list[Callable[[], Any]] = []
        try:
            for index in before.keys() | self._noted.keys():
                restore(places[index], before.get(index, _NOTHING), self._noted.get(index, _NOTHING), undo)
            filled += [(held, held.copy()) for was in before.values() for held in was.values() if type(held) in _FILLED]
            for name, buffer in self._scripted:
                buffer.restore({name: buffer.tensor}, name, undo)
            for hooks, had in self._hooks:
                _restore_hooks(hooks, had, undo)
            yield
        finally:
            for index, (place, start) in enumerate(zip(places, starts, strict=True)):
                if len(place) > start or index in before:
                    _put_back(place, start, before.get(index, _NOTHING))
            for held, content in filled:
                if len(held) != len(content):  # of most it does not change
                    fill(held, content)
            for function in undo:
                function()


def _put_back(place: dict[str, Any], start: int, before: dict[str, Any]) -> None:
    """Let a dict hold, from number `start` on, the items that it held before."""
    if len(place) == start + len(before) and all(map(is_, islice(place.values(), start, None), before.values())):
        return
    for name in [name for name in islice(place, start, None) if name not in before]:
        if not is_sharded(place[name]):
            del place[name]
    for name, value in before.items():
        if place.get(name, MISSING) is not value and not is_sharded(value):
            place[name] = value


def _restore_hooks(hooks: dict[int, Any], noted: dict[int, Any], undo: list[Callable[[], Any]]) -> None:
    """Give a module back the hooks that were removed since forward. The dict stays the same: handles remove hooks from it."""
    if hooks.keys() >= noted.keys():
        return
    before = dict(hooks)
    undo.append(partial(fill, hooks, before))
    fill(hooks, noted | before)


def _attributes(place: dict[str, Any], start: int) -> dict[str, Any]:
    """Note the attributes of a module from number `start` on."""
    noted = {name: value for name, value in islice(place.items(), start, None) if type(value) in NOTED}
    if BY_VALUE.isdisjoint(map(type, noted.values())):
        return noted
    return {
        name: noted_attribute(value) if type(value) in BY_VALUE else value
        for name, value in noted.items()
        if not is_sharded(value)
    }


def _buffers(place: dict[str, Any]) -> dict[str, Any]:
    return {name: noted_buffer(tensor) for name, tensor in place.items()}
