"""A layer's modules and arguments at the start of its forward: what a recomputation restores, and what it watches.

Note [what a recomputation sees]
It sees as they were at the start of forward: buffers and tensors in attributes of modules, if they have no gradient and less than
1 MiB, simple attributes (numbers, strings, None), and generators in attributes. Afterwards the modules hold what they held before
the recomputation. A tensor that forward sets as an attribute (an auxiliary loss) is not there during the recomputation.
Other tensors of modules are watched, and so are the attributes of objects that are arguments. A change by forward is an error at the
end of forward, any other change an error before the recomputation. Lists, dicts and objects in attributes of modules are not watched:
they may hold a graph, which holds the layer's call.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn import Parameter

from rlx.offload.runtime.layers import is_fsdp1
from rlx.offload.runtime.pytree import sort_leaves
from rlx.offload.storage.tensor_bytes import is_parameter, version_of

_VERSION, _REQUIRES_GRAD = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
SMALL_BYTES = 1 << 20
_SIMPLE = frozenset({type(None), bool, int, float, str})
_NOTED: set[type] = {*_SIMPLE, Tensor, torch.Generator, random.Random}  # NumPy's generators join them
_MISSING = object()
_NOTHING: dict[str, Any] = {}
_OF_TORCH = list(vars(nn.Module()))  # names that torch gives each module, first; none of them is noted, to take no time
# Modules whose forward reads no simple attributes, or that have no forward.
_WITHOUT = (
    *(nn.Linear, nn.Identity, nn.SiLU, nn.ModuleList, nn.ModuleDict, nn.Sequential),
    *(nn.ParameterList, nn.ParameterDict),
)
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
Site = tuple[weakref.ref[nn.Module], str, str]  # module, attribute, and the attribute's path from the layer


class _Copied(NamedTuple):
    """A small tensor without a gradient, and its value: batch normalisation writes past the version counter."""

    tensor: Tensor
    value: Tensor

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        """Put the value in place: into the same tensor, if possible, without a new version, since graphs may have saved it."""
        now, value = self.tensor, self.value
        can_be_written = (
            place.get(name) is now
            and (now.shape, now.dtype) == (value.shape, value.dtype)
            and not now.is_inference()
            and (0 not in now.stride() or now.is_contiguous())
        )
        if can_be_written:
            undo.append(partial(now.data.copy_, now.detach().clone()))
            now.data.copy_(value)
        else:
            place[name] = value.clone()


class _Watched(NamedTuple):
    """A tensor that is large, has a gradient or has no strided layout. It is put in place for a recomputation if it is alive."""

    tensor: weakref.ref[Tensor]
    version: int

    def is_whole(self) -> bool:
        tensor = self.tensor()
        return tensor is not None and version_of(tensor) == self.version

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        place[name] = self.tensor()


class _Drawing(NamedTuple):
    """A generator of the layer's own, and its state."""

    generator: Any
    state: Any

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        read, write = _access(self.generator)
        undo.append(partial(write, read()))
        write(self.state)
        place[name] = self.generator


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if hasattr(generator, "bit_generator"):  # numpy.random.Generator
        bits = generator.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    return generator.get_state, generator.set_state


def _noted(value: Any, is_buffer: bool = False) -> Any:
    if not isinstance(value, Tensor):
        return None if value is None else _Drawing(value, _access(value)[0]())
    if not is_buffer and is_parameter(value):  # FSDP1 sets views of parameters as attributes, others in each pass
        return None
    is_small = value.layout is torch.strided and not value.is_nested and value.nbytes < SMALL_BYTES
    if is_small and not value.requires_grad:
        return _Copied(value, value.detach().clone())
    return _Watched(weakref.ref(value), version_of(value))


def _noted_attributes(place: dict[str, Any], start: int) -> dict[str, Any]:
    noted = {name: value for name, value in islice(place.items(), start, None) if type(value) in _NOTED}
    if _SIMPLE.issuperset(map(type, noted.values())):
        return noted
    noted = {name: value if type(value) in _SIMPLE else _noted(value) for name, value in noted.items()}
    return {name: value for name, value in noted.items() if value is not None or place[name] is None}


def _first_attribute(module: nn.Module) -> int:
    """Return how many of a module's attributes come before the first that is noted."""
    own = vars(module)
    if type(module) in _WITHOUT and Tensor not in map(type, own.values()):
        return len(own)  # one that is set later comes after them
    count = len(_OF_TORCH)
    return count if list(islice(own, count)) == _OF_TORCH else 0


class TensorSites:
    """The modules of a layer and its parameters. Slots check those that autograd saves, `ModuleState` the others (biases)."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)
        self.find()

    def find(self) -> None:
        """Search the layer again: adapters may have been added to it since."""
        layer = self._layer()
        assert layer is not None
        if (numpy := sys.modules.get("numpy.random")) is not None:
            _NOTED.update((numpy.Generator, numpy.RandomState))
        self.parameters: list[Site] = []
        found: list[nn.Module] = []
        for path, module in layer.named_modules():
            reference, prefix = weakref.ref(module), f"{path}." if path else ""
            # Tied ones twice, since `torch.func.functional_call` replaces both.
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                self.parameters.append((reference, name, prefix + name))
            found.append(module)
        unlisted = (inner for module in tuple(found) for listed in _listed(module) for inner in listed.modules())
        found = list({id(module): module for module in (*found, *unlisted)}.values())
        self._scripted = [weakref.ref(module) for module in found if isinstance(module, ScriptModule)]
        self.is_scripted = bool(self._scripted)  # a part of the layer is compiled by TorchScript
        others = [module for module in found if not isinstance(module, ScriptModule) and not is_fsdp1(module)]
        self._modules = [weakref.ref(module) for module in others]
        self._starts = list(map(_first_attribute, others))
        self._children = _children(others)
        # Parameters that the last forward did not save, and ids of those that it saved; one tuple for threads.
        self.unsaved: tuple[list[Site], list[int]] = (self.parameters, [])

    def modules(self, given: Iterable[nn.Module]) -> tuple[list[tuple[nn.Module, int]], list[nn.Module]]:
        """Return the layer's modules and those `given` as arguments, with their numbers of attributes not noted; the scripted ones."""
        modules: list[Any] = [reference() for reference in self._modules]
        try:
            is_same = _children(modules) == self._children
        except AttributeError:  # one is gone
            is_same = False
        if not is_same:
            self.find()
            modules = [reference() for reference in self._modules]
        starts = list(zip(modules, self._starts, strict=True))
        ids = set(map(id, modules)) if given else ()
        for module in {id(inner): inner for outer in given for inner in outer.modules()}.values():
            if id(module) not in ids and not isinstance(module, ScriptModule) and not is_fsdp1(module):
                starts.append((module, _first_attribute(module)))
        return starts, [part for reference in self._scripted if (part := reference()) is not None]


def _children(modules: Iterable[nn.Module]) -> list[int]:
    return [id(child) for module in modules for child in module._modules.values()]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in plain lists, tuples and dicts of a module."""
    for value in tuple(vars(module).values()):
        if type(value) in (list, tuple, dict):
            items = value.values() if type(value) is dict else value
            yield from (item for item in items if isinstance(item, nn.Module))


class ModuleState:
    """Parameters, buffers and attributes of a layer at the start of one forward call (Note [what a recomputation sees]).

    A parameter that has changed since then is an error. One in whose place another tensor is now (`torch.func.functional_call`) comes
    back during the recomputation. `given` is what the call's arguments hold besides tensors and numbers.
    """

    def __init__(self, sites: TensorSites, given: Sequence[Any] = ()) -> None:
        self._sites = sites
        self._unsaved_sites, self._saved_ids = sites.unsaved
        self._parameters = _at(self._unsaved_sites)
        self._versions = _versions(self._parameters)
        self._saved: list[Any] = []
        self._registered: list[tuple[Site, Tensor]] = []  # parameters, at the end of forward
        self._required_grad: list[bool] = []
        self.rewritten: list[tuple[Tensor, int]] = []  # by the recomputation: buffers, and the number of writes to each
        modules, scripted = sites.modules([each for each in given if isinstance(each, nn.Module)] if given else ())
        attributes = [module.__dict__ for module, _ in modules]
        buffers = [place["_buffers"] for place in attributes]
        self._kinds = [type(module) for module, _ in modules]
        self._places = [*attributes, *buffers]
        self._starts = [start for _, start in modules] + [0] * len(buffers)
        # Most have none of their own, and a layer with LoRA has 80 modules: no function is called for each.
        self._noted = {
            i: _noted_attributes(m.__dict__, start) for i, (m, start) in enumerate(modules) if len(m.__dict__) > start
        }
        self._noted |= {
            i: {name: _noted(tensor, is_buffer=True) for name, tensor in place.items()}
            for i, place in enumerate(buffers, len(attributes))
            if place
        }
        self._hooks = [  # a module's dict, and what it held; the layer's own hooks run outside of its recomputation
            (place[name], dict(place[name]))
            for place in attributes[1:]
            if place["_forward_pre_hooks"] or place["_forward_hooks"]
            for name in _HOOKS
            if place[name]
        ]
        self._others: list[tuple[str, Any]] = [  # scripted modules have no Python attributes
            (name, noted)
            for module in scripted
            for name, tensor in module._buffers.items()
            if isinstance(noted := _noted(tensor, is_buffer=True), _Copied)
        ]
        self._others += [("", _noted(each)) for each in given if type(each) in _NOTED]
        self._objects = [each for each in given if not isinstance(each, nn.Module) and type(each) not in _NOTED]
        self._held = _held_by(self._objects) if self._objects else _NOTHING

    def end_forward(self, saved: Iterable[Parameter]) -> None:
        """Note which parameters autograd has saved; RuntimeError if forward changed what a recomputation would see changed."""
        self._saved = list(saved)
        ids = list(map(id, self._saved))
        if ids != self._saved_ids:
            self._watch_unsaved(ids)
        self._required_grad = self._require_grad()
        sites = self._sites.parameters
        registered = zip(sites, map(_registered, sites), strict=True)
        self._registered = [(site, now) for site, now in registered if now is not None]
        for index, name, was in list(self._watched()):
            now = self._places[index].get(name)
            if index < len(self._kinds) and now is not was.tensor():
                del self._noted[index][name]  # the last result, say: a recomputation sets it again
            elif now is not was.tensor() or not was.is_whole():
                raise RuntimeError(
                    f"a layer's forward changes {self._named(index, name)}, and recomputation would change it again. It is not "
                    f"restored, because it has a gradient, no strided layout, or {SMALL_BYTES} bytes or more. {_OUT}"
                )
        if self._objects and (change := self._changed_object()):
            raise RuntimeError(
                f"a layer's forward changes {change}; recomputation would see the change. Return the new value from the layer "
                f"and pass it on, or use a list or dict for it. {_OUT}"
            )

    def leave_forward(self) -> None:
        self._places, self._noted, self._objects = [], {}, []

    def _watched(self) -> Iterator[tuple[int, str, _Watched]]:
        for index, noted in self._noted.items():
            if _Watched in map(type, noted.values()):
                yield from [(index, name, each) for name, each in noted.items() if type(each) is _Watched]

    def _named(self, index: int, name: str) -> str:
        kind = self._kinds[index % len(self._kinds)].__name__
        return f"{'attribute' if index < len(self._kinds) else 'buffer'} {name!r} of its module {kind}"

    def _changed_object(self) -> str | None:
        now = _held_by(self._objects)
        for key in [*self._held, *now]:
            if self._held.get(key) != now.get(key):
                return f"attribute {key[2]!r} of an argument of class {key[1]}"
        return None

    def _watch_unsaved(self, saved_ids: list[int]) -> None:
        sites = self._sites
        watched = set(map(id, self._parameters))
        tensors = _at(sites.parameters)
        if not set(map(id, tensors)).issuperset(saved_ids):
            sites.find()
            tensors = _at(sites.parameters)
        unsaved = [(site, t) for site, t in zip(sites.parameters, tensors, strict=True) if id(t) not in saved_ids]
        for site, tensor in unsaved:
            if id(tensor) not in watched:
                self._unsaved_sites = [*self._unsaved_sites, site]
                self._parameters.append(tensor)
                self._versions += _versions([tensor])
        sites.unsaved = [site for site, _ in unsaved], saved_ids

    def _require_grad(self) -> list[bool]:
        tensors = (*self._saved, *self._parameters)
        try:
            return list(map(_REQUIRES_GRAD, tensors))
        except AttributeError:  # None
            return [tensor is not None and tensor.requires_grad for tensor in tensors]

    def changed(self) -> str | None:
        versions = _versions(self._parameters)
        if versions != self._versions:
            index = next(i for i, version in enumerate(versions) if version != self._versions[i])
            return f"its parameter {self._unsaved_sites[index][1]!r} has been modified by an inplace operation"
        if self._require_grad() != self._required_grad:  # autograd would save other tensors
            return "a parameter of it has been frozen or unfrozen"
        for (_, name, _), was in self._replaced():
            if not was.is_inference() and was.untyped_storage().nbytes() == 0 < was.nbytes:  # FSDP2 has made new ones
                return f"its parameter {name!r} has been replaced, and its memory is free"
        for index, name, watched in self._watched():
            if not watched.is_whole():
                return f"{self._named(index, name)} has been modified or replaced"
        if self._objects and (change := self._changed_object()):
            return f"{change} has been modified or replaced"
        return None

    def _replaced(self) -> list[tuple[Site, Tensor]]:
        return [(site, was) for site, was in self._registered if _registered(site) is not was]

    def replaced(self) -> dict[str, Tensor]:
        return {path: was for (_, _, path), was in self._replaced()}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Enclose a recomputation: the modules hold what they held at the start of forward."""
        places, starts = self._places, self._starts
        before = {
            index: dict(islice(place.items(), start, None))
            for index, (place, start) in enumerate(zip(places, starts, strict=True))
            if len(place) > start
        }
        copied = [each for noted in self._noted.values() for each in noted.values() if type(each) is _Copied]
        versions = [version_of(each.tensor) for each in copied]
        filled: list[tuple[Any, Any]] = []
        undo: list[Callable[[], Any]] = []
        try:
            for index in before.keys() | self._noted.keys():
                _restore(places[index], before.get(index, _NOTHING), self._noted.get(index, _NOTHING), undo)
            filled += [
                (held, held.copy()) for was in before.values() for held in was.values() if type(held) in (list, dict)
            ]
            for name, noted in self._others:
                noted.restore({name: noted[0]}, name, undo)
            for hooks, had in self._hooks:
                if not hooks.keys() >= had.keys():  # some were removed; handles remove hooks from this dict
                    now = dict(hooks)
                    undo.append(partial(_fill, hooks, now))
                    _fill(hooks, had | now)
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
            writes = [(each.tensor, version_of(each.tensor) - was) for each, was in zip(copied, versions, strict=True)]
            self.rewritten = [(tensor, count) for tensor, count in writes if count]


_OUT = "Leave the layer out of layers=, or use enable_ckpt=False"


def _restore(
    place: dict[str, Any], before: dict[str, Any], noted: dict[str, Any], undo: list[Callable[[], Any]]
) -> None:
    """Let a dict of attributes or buffers, which holds `before`, hold what was noted of it, and no other tensors."""
    for name, was in noted.items():
        if type(was) in (_Copied, _Watched, _Drawing):
            was.restore(place, name, undo)
        elif before.get(name, _MISSING) is not was:
            place[name] = was
    if Tensor in map(type, before.values()):
        for name, value in before.items():
            if type(value) is Tensor and name not in noted and not is_parameter(value):
                del place[name]


def _put_back(place: dict[str, Any], start: int, before: dict[str, Any]) -> None:
    """Let a dict hold, from number `start` on, the items that it held before."""
    if len(place) == start + len(before) and all(
        map(operator.is_, islice(place.values(), start, None), before.values())
    ):
        return
    for name in [name for name in islice(place, start, None) if name not in before]:
        if not _is_sharded(place[name]):
            del place[name]
    for name, value in before.items():
        if place.get(name, _MISSING) is not value and not _is_sharded(value):
            place[name] = value


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and is_parameter(value)


def _fill(held: Any, content: Any) -> None:
    held.clear()
    held.extend(content) if isinstance(held, list) else held.update(content)


def _held_by(objects: Iterable[Any]) -> dict[Any, Any]:
    """Return what marks the values in objects, and in the objects that these hold, by object, class and attribute."""
    found: dict[Any, Any] = {}
    pending = [(each, True) for each in objects]
    for each, is_outer in pending:
        for name, value in _attributes_of(each):
            tensors: list[Tensor] = []
            others: list[Any] = []
            sort_leaves((value,), tensors, others)
            size = len(value) if isinstance(value, list | dict | set) else None
            simple = value if type(value) in _SIMPLE else None
            found[id(each), type(each).__name__, name] = simple, size, [(id(t), version_of(t)) for t in tensors]
            pending += [(inner, False) for inner in others if is_outer]
    return found


def _attributes_of(each: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(each, set):
        yield "elements", list(each)
    if isinstance(each, nn.Module | ModuleType | type | Tensor):
        return
    if type(attributes := getattr(each, "__dict__", None)) is dict:
        yield from attributes.items()
    for kind in type(each).__mro__:
        if "__slots__" in vars(kind):
            slots = [name for name, value in vars(kind).items() if type(value) is MemberDescriptorType]
            yield from ((name, getattr(each, name)) for name in slots if hasattr(each, name))


def _at(sites: list[Site]) -> list[Any]:
    return [getattr(module(), name, None) for module, name, _ in sites]


def _registered(site: Site) -> Tensor | None:
    module = site[0]()
    if module is None:
        return None
    parameters = module._parameters
    # TorchScript's mapping has no `get`.
    return parameters[site[1]] if site[1] in parameters else None  # noqa: SIM401


def _versions(tensors: list[Any]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except (AttributeError, RuntimeError):  # None, or a tensor made in inference mode: they have no version
        return [0 if tensor is None else version_of(tensor) for tensor in tensors]
