"""A layer's parameters and buffers at the beginning of its forward: a recomputation must see the same values."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn import Parameter

from rlx.offload.recompute.attribute_state import ModuleAttributes, first_attribute
from rlx.offload.runtime.layers import is_fsdp1

_VERSION, _REQUIRES_GRAD = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
Site = tuple[weakref.ref[nn.Module], str, str]  # module, attribute, and the attribute's path from the layer


class TensorSites:
    """The modules of a layer, and its parameters as `Site`s, with weak references to the modules.

    Slots check the parameters that autograd saves. `ModuleState` checks the others (biases), which is slow. So this class
    remembers which parameters the last forward saved.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)
        self.find()

    def find(self) -> None:
        """Search the layer again: adapters may have been added to it since."""
        layer = self._layer()
        assert layer is not None
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
        others = [module for module in found if not isinstance(module, ScriptModule) and not is_fsdp1(module)]
        self._modules = [weakref.ref(module) for module in others]
        self._starts = list(map(first_attribute, others))
        self._children = _children(others)
        # Parameters that the last forward did not save, and ids of those that it saved. One tuple, so that threads replace both.
        self.unsaved: tuple[list[Site], list[int]] = (self.parameters, [])

    @property
    def is_scripted(self) -> bool:
        """Whether a part of the layer is compiled by TorchScript."""
        return bool(self._scripted)

    def attributes(self, given: Sequence[nn.Module]) -> ModuleAttributes:
        """Return what the layer's modules hold now, and those that it was `given` as arguments."""
        modules: list[Any] = [reference() for reference in self._modules]
        try:
            is_same = _children(modules) == self._children
        except AttributeError:  # one is gone
            is_same = False
        if not is_same:
            self.find()
            modules = [reference() for reference in self._modules]
        starts = list(zip(modules, self._starts, strict=True))
        if given:
            ids = set(map(id, modules))
            others = (m for m in given if id(m) not in ids and not isinstance(m, ScriptModule) and not is_fsdp1(m))
            starts += [(module, first_attribute(module)) for module in others]
        scripted = (module for reference in self._scripted if (module := reference()) is not None)
        return ModuleAttributes(starts, scripted)


def _children(modules: Iterable[nn.Module]) -> list[int]:
    return [id(child) for module in modules for child in module._modules.values()]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in plain lists, tuples and dicts of a module."""
    for value in tuple(vars(module).values()):
        if type(value) in (list, tuple, dict):
            yield from (
                item for item in (value.values() if type(value) is dict else value) if isinstance(item, nn.Module)
            )


class ModuleState:
    """Parameters, buffers and attributes of a layer at the start of one forward call.

    A parameter that has changed since then is an error, because its old value is lost. One in whose place another tensor
    is now comes back during the recomputation. Example: `torch.func.functional_call(model, weights, inputs)` puts `weights`
    in their places for the forward alone. Small buffers (running statistics, counters, scales) get their old values back
    during the recomputation, and so do attributes (`ModuleAttributes`).

    Args:
        sites: of the layer.
        given: modules among the arguments of the call.
    """

    def __init__(self, sites: TensorSites, given: Sequence[nn.Module] = ()) -> None:
        self._attributes = sites.attributes(given)
        self.restored = self._attributes.restored
        self._sites = sites
        self._unsaved_sites, self._saved_ids = sites.unsaved
        self._parameters = _at(self._unsaved_sites)
        self._versions = _versions(self._parameters)
        self._saved: list[Any] = []
        self._registered: list[tuple[Site, Tensor]] = []  # parameters, at the end of forward
        self._required_grad: list[bool] = []

    def end_forward(self, saved: Iterable[Parameter]) -> None:
        """Note which parameters autograd has saved in forward; RuntimeError if forward changed a large buffer."""
        self._saved = list(saved)
        ids = list(map(id, self._saved))
        if ids != self._saved_ids:
            self._watch_unsaved(ids)
        self._required_grad = self._require_grad()
        sites = self._sites.parameters
        registered = zip(sites, map(_registered, sites), strict=True)
        self._registered = [(site, now) for site, now in registered if now is not None]
        self._attributes.end_forward()

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
        """Describe the first parameter or buffer that has changed since forward; None if none has."""
        versions = _versions(self._parameters)
        if versions != self._versions:
            index = next(i for i, version in enumerate(versions) if version != self._versions[i])
            return f"its parameter {self._unsaved_sites[index][1]!r} has been modified by an inplace operation"
        if self._require_grad() != self._required_grad:  # autograd would save other tensors
            return "a parameter of it has been frozen or unfrozen"
        for (_, name, _), was in self._replaced():
            if not was.is_inference() and was.untyped_storage().nbytes() == 0 < was.nbytes:  # FSDP2 has made new ones
                return f"its parameter {name!r} has been replaced, and its memory is free"
        return self._attributes.changed()

    def _replaced(self) -> list[tuple[Site, Tensor]]:
        return [(site, was) for site, was in self._registered if _registered(site) is not was]

    def replaced(self) -> dict[str, Tensor]:
        """Return the parameters of forward in whose places others are now, by their names in the layer."""
        return {path: was for (_, _, path), was in self._replaced()}


def _at(sites: list[Site]) -> list[Any]:
    return [getattr(module(), name, None) for module, name, _ in sites]


def _registered(site: Site) -> Tensor | None:
    """Return the parameter of a site, None if there is none: FSDP1 sets views as attributes, others in each pass."""
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
        return [tensor._version if tensor is not None and not tensor.is_inference() else 0 for tensor in tensors]
