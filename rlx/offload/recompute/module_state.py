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
Site = tuple[weakref.ref[nn.Module], str]


class TensorSites:
    """The parameters and buffers of a layer as (module, attribute) pairs, with weak references to the modules.

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
        for module in layer.modules() if layer is not None else ():
            reference = weakref.ref(module)
            self.parameters += [(reference, name) for name, _ in module.named_parameters(recurse=False)]
            self.buffers += [(reference, name) for name, _ in module.named_buffers(recurse=False)]


class _BufferState(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str
    tensor: Any
    version: int
    value: Tensor | None  # a buffer's, before forward


class ModuleState:
    """Parameters and buffers of a layer at the start of one forward call.

    A parameter that has changed since then is an error, because its old value is lost. Small buffers (running statistics,
    counters, scales) get their old values back during the recomputation, without a new version: graphs may have saved them.
    """

    def __init__(self, sites: TensorSites) -> None:
        self._sites = sites
        self._unsaved_sites, self._saved_ids = sites.unsaved
        self._parameters = _at(self._unsaved_sites)
        self._versions = _versions(self._parameters)
        self._saved: list[Any] = []
        self._required_grad: list[bool] = []
        self._buffers: list[_BufferState] = []
        self._large_buffers: list[_BufferState] = []
        for module, name in sites.buffers:
            buffer = _BufferState(module, name, *_tensor_at(module, name), None)
            if isinstance(buffer.tensor, Tensor) and buffer.tensor.nbytes < _SMALL_BYTES:
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
        if self._large_buffers and (buffer := self._changed_large_buffer()):
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
        for (module, name), was in zip(self._unsaved_sites, self._parameters, strict=True):
            now = getattr(module(), name, None)
            # FSDP1 sets new views in each pass; they are not of type Parameter.
            if now is not was and Parameter in (type(now), type(was)):
                return f"its parameter {name!r} has been replaced"
        if self._large_buffers and (buffer := self._changed_large_buffer()):
            return f"its buffer {buffer.name!r} has been modified"
        return None

    def _changed_large_buffer(self) -> _BufferState | None:
        for buffer in self._large_buffers:
            tensor, version = _tensor_at(buffer.module, buffer.name)
            if tensor is not buffer.tensor or version != buffer.version:
                return buffer
        return None

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
    return [getattr(module(), name, None) for module, name in sites]


def _versions(tensors: list[Any]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except (AttributeError, RuntimeError):  # None, or a tensor made in inference mode: they have no version
        return [tensor._version if tensor is not None and not tensor.is_inference() else 0 for tensor in tensors]


def _tensor_at(module: weakref.ref[nn.Module], name: str) -> tuple[Any, int]:
    tensor = getattr(module(), name, None)
    return tensor, tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0
