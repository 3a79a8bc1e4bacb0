"""What objects hold at the start of a layer's forward, besides parameters: buffers, attributes and hooks of modules.

A recomputation sees the same, and leaves no trace: afterwards each object holds what it held before the recomputation.

Note [attributes]
A forward also reads plain attributes: `layer.mask = mask`, set by the model before each forward, or `weight`, which the
hook of a spectral normalisation sets. Tensors, simple values (numbers, strings, None) and the states of random generators are
noted. Lists and other objects in attributes of modules are not: they may hold a graph, which holds the layer's call. For the
same reason a tensor with a gradient is noted as an alias without its graph. A large one that forward itself replaces is dropped
when forward has ended: mostly it is the last result, kept for a look at it, and would take memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import islice
from operator import is_
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rlx.offload.recompute.stash import StashedTensor
from rlx.offload.runtime.pytree import sort_leaves, tensors_in
from rlx.offload.storage.regions import is_parameter, size_bytes

SMALL_BYTES = 1 << 20
_BY_VALUE = frozenset({Tensor, torch.Generator})  # what they hold is noted
_NOTED = _BY_VALUE | {type(None), bool, int, float, str}
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
_MISSING = object()
_NOTHING: dict[str, Any] = {}
_T = TypeVar("_T")


def first_attribute(module: nn.Module) -> int:
    """Return how many of a module's attributes come before the first that is noted."""
    own = vars(module)
    if type(module) in _WITHOUT and Tensor not in map(type, own.values()):
        return len(own)  # one that is set later comes after them
    count = len(_OF_TORCH)
    return count if list(islice(own, count)) == _OF_TORCH else 0


class _Copied(NamedTuple):
    """A small tensor without a gradient, and its value: batch normalisation writes to its statistics past their version."""

    tensor: Tensor
    value: Tensor

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        """Put the value in place: into the same tensor, if possible, without a new version, since graphs may have saved it."""
        now = place.get(name)
        if now is self.tensor and _can_be_written(now, self.value):
            before = now.detach().clone()
            undo.append(lambda: now.data.copy_(before))
            now.data.copy_(self.value)
        else:
            place[name] = self.value.clone()


class _Kept(NamedTuple):
    """A buffer that is large or has no strided layout."""

    tensor: Tensor
    version: int

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        """Put the tensor in place."""
        place[name] = self.tensor


class _Drawing(NamedTuple):
    """A random generator of the layer's own, and its state."""

    generator: torch.Generator
    state: Tensor

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        """Put the generator in place, in the state that it had."""
        undo.append(partial(self.generator.set_state, self.generator.get_state()))
        self.generator.set_state(self.state)
        place[name] = self.generator


class _Aliased(NamedTuple):
    """An attribute that is large or has a gradient, or a small buffer with one."""

    tensor: weakref.ref[Tensor]
    alias: StashedTensor

    @property
    def is_large(self) -> bool:
        """Whether it takes memory that counts."""
        return size_bytes(self.alias.version_alias) >= SMALL_BYTES

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        """Put a tensor with the same value in place; RuntimeError if it was overwritten."""
        if place.get(name) is not self.tensor() or not self.alias.is_untouched:
            place[name] = self.alias.tensor()


_RESTORED = (_Copied, _Kept, _Aliased, _Drawing)


class ModuleAttributes:
    """Buffers, attributes and hooks of modules at the start of a layer's forward (Note [attributes]).

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
            if isinstance(noted := _buffer(tensor), _Copied)
        ]

    def _of_type(self, kind: type[_T]) -> Iterator[tuple[int, str, _T]]:
        """Yield a place, a name in it and what was noted of it, for what was noted as `kind`."""
        for index, noted in self._noted.items():
            if kind in map(type, noted.values()):
                yield from [(index, name, each) for name, each in noted.items() if type(each) is kind]

    def end_forward(self) -> None:
        """Forward has ended; RuntimeError if it changed a buffer of which there is no copy."""
        for index, name, (tensor, version) in self._of_type(_Kept):
            if self._places[index].get(name) is not tensor or _version_of(tensor) != version:
                why = f"it has {size_bytes(tensor)} bytes (limit {SMALL_BYTES})"
                raise RuntimeError(
                    f"a layer's forward changes its buffer {name!r}, of which no copy was made because "
                    f"{why if size_bytes(tensor) >= SMALL_BYTES else 'its layout is not strided'}; recomputation would change "
                    "it a second time. Leave the layer out of layers=, or use enable_ckpt=False"
                )
        for index, name, noted in self._of_type(_Aliased):
            if noted.is_large and self._places[index].get(name) is not noted.tensor():
                del self._noted[index][name]

    def changed(self) -> str | None:
        """Describe a buffer that has changed since forward and of which there is no copy; None if there is none."""
        for _, name, (tensor, version) in self._of_type(_Kept):
            if _version_of(tensor) != version:
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
                _restore(places[index], before.get(index, _NOTHING), self._noted.get(index, _NOTHING), undo)
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
                    _fill(held, content)
            for function in undo:
                function()


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
        self._generators = [_attribute(leaf) for leaf in unique.values() if isinstance(leaf, torch.Generator)]
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
                    _restore(place, was, noted, undo)
                else:
                    _fill(place, noted)
            yield
        finally:
            for place, was in zip(self._places, before, strict=True):
                _fill(place, was)
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
    return type(value) in _NOTED or isinstance(value, list | tuple | dict | deque) or bool(tensors_in(value))


def _fill(held: Any, content: Any) -> None:
    """Let a list, deque, set or mapping hold what it held before."""
    held.clear()
    if isinstance(held, list | deque):
        held.extend(content)
    else:
        held.update(content)


def _restore(
    place: MutableMapping[str, Any], before: dict[str, Any], noted: dict[str, Any], undo: list[Callable[[], Any]]
) -> None:
    """Let a dict of attributes or buffers, which holds `before`, hold what was noted of it, and no other tensors."""
    for name, was in noted.items():
        if type(was) in _RESTORED:
            was.restore(place, name, undo)
        elif before.get(name, _MISSING) is not was:
            place[name] = was
    if Tensor in map(type, before.values()):
        for name, value in before.items():
            if type(value) is Tensor and name not in noted and not _is_sharded(value):
                del place[name]


def _put_back(place: dict[str, Any], start: int, before: dict[str, Any]) -> None:
    """Let a dict hold, from number `start` on, the items that it held before."""
    if len(place) == start + len(before) and all(map(is_, islice(place.values(), start, None), before.values())):
        return
    for name in [name for name in islice(place, start, None) if name not in before]:
        if not _is_sharded(place[name]):
            del place[name]
    for name, value in before.items():
        if place.get(name, _MISSING) is not value and not _is_sharded(value):
            place[name] = value


def _restore_hooks(hooks: dict[int, Any], noted: dict[int, Any], undo: list[Callable[[], Any]]) -> None:
    """Give a module back the hooks that were removed since forward. The dict stays the same: handles remove hooks from it."""
    if hooks.keys() >= noted.keys():
        return
    before = dict(hooks)
    undo.append(partial(_fill, hooks, before))
    _fill(hooks, noted | before)


def _is_sharded(value: Any) -> bool:
    """Whether a value is a parameter or a view of one: FSDP1 sets views as attributes, others in each pass."""
    return isinstance(value, Tensor) and is_parameter(value)


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.nbytes < SMALL_BYTES


def _attributes(place: dict[str, Any], start: int) -> dict[str, Any]:
    """Note the attributes of a module from number `start` on."""
    noted = {name: value for name, value in islice(place.items(), start, None) if type(value) in _NOTED}
    if _BY_VALUE.isdisjoint(map(type, noted.values())):
        return noted
    return {
        name: _attribute(value) if type(value) in _BY_VALUE else value
        for name, value in noted.items()
        if not _is_sharded(value)
    }


def _buffers(place: dict[str, Any]) -> dict[str, Any]:
    return {name: _buffer(tensor) for name, tensor in place.items()}


def _buffer(tensor: Any) -> _Copied | _Aliased | _Kept | None:
    if not isinstance(tensor, Tensor):
        return None
    if not _is_small(tensor):
        return _Kept(tensor, _version_of(tensor))
    return _Aliased(weakref.ref(tensor), StashedTensor(tensor, None)) if tensor.requires_grad else _copied(tensor)


def _attribute(value: Any) -> _Copied | _Aliased | _Drawing:
    if isinstance(value, torch.Generator):
        return _Drawing(value, value.get_state())
    if _is_small(value) and not value.requires_grad:
        return _copied(value)
    return _Aliased(weakref.ref(value), StashedTensor(value, None))


def _copied(tensor: Tensor) -> _Copied:
    return _Copied(tensor, tensor.detach().clone())


def _can_be_written(tensor: Tensor, value: Tensor) -> bool:
    """Whether `value` can be copied into a tensor: not into an expanded one, nor into one that was resized."""
    return (
        tensor.shape == value.shape
        and tensor.dtype == value.dtype
        and not tensor.is_inference()
        and (0 not in tensor.stride() or tensor.is_contiguous())
    )


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
