"""A layer's parameters and buffers at the beginning of its forward: a recomputation must see the same values."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

_SMALL_BYTES = 1 << 20
_VERSION, _REQUIRES_GRAD = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
Site = tuple[weakref.ref[nn.Module], str, str]  # module, attribute, and the attribute's path from the layer


class TensorSites:
    """The parameters and buffers of a layer as `Site`s, with weak references to the modules.

    Slots check the parameters that autograd saves. `ModuleState` checks the others (biases), which is slow. So this class
    remembers which parameters the last forward saved.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)
        self.find()
        # Parameters that the last forward did not save, and ids of those that it saved. One tuple, so that threads replace both.
        self.unsaved: tuple[list[Site], list[int]] = (self.parameters, [])

    def find(self) -> None:
        """Search the layer again: adapters may have been added to it since."""
        self.parameters: list[Site] = []
        self.buffers: list[Site] = []
        layer = self._layer()
        for path, module in layer.named_modules() if layer is not None else ():
            reference, prefix = weakref.ref(module), f"{path}." if path else ""
            # Tied ones twice, since `torch.func.functional_call` replaces both.
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                self.parameters.append((reference, name, prefix + name))
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                self.buffers.append((reference, name, prefix + name))


class _BufferState(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str
    path: str
    tensor: Any
    version: int
    value: Tensor | None  # a buffer's, before forward

    @property
    def is_as_before(self) -> bool:
        """Whether the same tensor is there, and nothing has written to it."""
        tensor, version = _tensor_at(self.module, self.name)
        return tensor is self.tensor and version == self.version


class ModuleState:
    """Parameters and buffers of a layer at the start of one forward call.

    A parameter that has changed since then is an error, because its old value is lost. One in whose place another tensor
    is now comes back during the recomputation. Example: `torch.func.functional_call(model, weights, inputs)` puts `weights`
    in their places for the forward alone. Small buffers (running statistics, counters, scales) get their old values back
    during the recomputation, without a new version: graphs may have saved them.
    """

    def __init__(self, sites: TensorSites) -> None:
        self._sites = sites
        self._unsaved_sites, self._saved_ids = sites.unsaved
        self._parameters = _at(self._unsaved_sites)
        self._versions = _versions(self._parameters)
        self._saved: list[Any] = []
        self._registered: list[tuple[Site, Tensor]] = []  # parameters, at the end of forward
        self._required_grad: list[bool] = []
        self._buffers: list[_BufferState] = []
        self._large_buffers: list[_BufferState] = []
        for module, name, path in sites.buffers:
            buffer = _BufferState(module, name, path, *_tensor_at(module, name), None)
            # One with a gradient comes from `functional_call`.
            is_constant = isinstance(buffer.tensor, Tensor) and not buffer.tensor.requires_grad
            if is_constant and buffer.tensor.nbytes < _SMALL_BYTES:
                # Always copied, since batch normalisation changes its statistics without increasing the version.
                self._buffers.append(buffer._replace(value=buffer.tensor.detach().clone()))
            else:
                self._large_buffers.append(buffer)

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
        if buffer := next((each for each in self._large_buffers if not each.is_as_before), None):
            raise RuntimeError(
                f"a layer's forward changes its buffer {buffer.name!r}, of which no copy was made because it has "
                f"{buffer.tensor.nbytes} bytes (limit {_SMALL_BYTES}); recomputation would change it a second time. "
                "Leave the layer out of layers=, or use enable_ckpt=False"
            )

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
        for buffer in self._large_buffers:
            if _version_of(buffer.tensor) != buffer.version:
                return f"its buffer {buffer.name!r} has been modified"
        return None

    def _replaced(self) -> list[tuple[Site, Tensor]]:
        return [(site, was) for site, was in self._registered if _registered(site) is not was]

    def replaced(self) -> dict[str, Tensor]:
        """Return the tensors of forward in whose places others are now, by their names in the layer."""
        moved = {buffer.path: buffer.tensor for buffer in self._large_buffers if not buffer.is_as_before}
        return {path: was for (_, _, path), was in self._replaced()} | moved

    def restored(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context in which small buffers have their values from before forward; None if there are none."""
        return self._restored() if self._buffers else None

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for buffer in self._buffers:
                module = buffer.module()
                assert module is not None and buffer.value is not None
                now = getattr(module, buffer.name)
                stack.callback(setattr, module, buffer.name, now)
                if now is buffer.tensor:
                    stack.callback(now.data.copy_, now.detach().clone())
                    now.data.copy_(buffer.value)
                else:
                    setattr(module, buffer.name, buffer.value.clone())
            yield


def _at(sites: list[Site]) -> list[Any]:
    return [getattr(module(), name, None) for module, name, _ in sites]


def _registered(site: Site) -> Tensor | None:
    """Return the parameter of a site, None if there is none: FSDP1 sets views as attributes, others in each pass."""
    module = site[0]()
    return None if module is None else module._parameters.get(site[1])


def _versions(tensors: list[Any]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except (AttributeError, RuntimeError):  # None, or a tensor made in inference mode: they have no version
        return [tensor._version if tensor is not None and not tensor.is_inference() else 0 for tensor in tensors]


def _tensor_at(module: weakref.ref[nn.Module], name: str) -> tuple[Any, int]:
    tensor = getattr(module(), name, None)
    return tensor, _version_of(tensor)


def _version_of(tensor: Any) -> int:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0
