"""What a layer's own parameters and buffers were when its forward began: recomputation must see the same."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

_SMALL_BYTES = 1 << 20
_VERSION, _WANTS_GRADIENT = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
Place = tuple[weakref.ref[nn.Module], str]


class TensorSites:
    """Where a layer keeps parameters and buffers: (module, attribute) pairs, with the modules held weakly.

    Parameters that autograd saves are watched by their slots; the others (biases) have to be looked at, which is slow, so
    they are told apart by what the last forward saved.

    Args:
        layer: the layer, complete.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)
        self.find()
        # Those that the last forward did not save, and the ids of the parameters that it did; threads read both at once.
        self.unsaved: tuple[list[Place], list[int]] = (self.parameters, [])

    def find(self) -> None:
        """Look again: parts may have been added to the layer since, as adapters are."""
        self.parameters: list[Place] = []
        self.buffers: list[Place] = []
        layer = self._layer()
        for module in layer.modules() if layer is not None else ():
            reference = weakref.ref(module)
            self.parameters += [(reference, name) for name, _ in module.named_parameters(recurse=False)]
            self.buffers += [(reference, name) for name, _ in module.named_buffers(recurse=False)]


class _Seen(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str
    tensor: Any
    version: int
    value: Tensor | None  # a buffer's, before forward


class ModuleState:
    """Parameters and buffers of a layer at the start of one forward call.

    A parameter that has changed when the layer is recomputed is refused: by then its old value is nowhere. Small buffers
    (running statistics, counters, scales) get their old values back for the recomputation and lose them after it, past
    the version counters, for the values are those that graphs alive have saved.
    """

    def __init__(self, places: TensorSites) -> None:
        self._all_places = places
        self._places, self._saved_ids = places.unsaved
        self._parameters = _at(self._places)
        self._versions = _versions(self._parameters)
        self._saved: list[Any] = []
        self._wanted: list[bool] = []
        self._buffers: list[_Seen] = []
        self._large_buffers: list[_Seen] = []
        for module, name in places.buffers:
            seen = _Seen(module, name, *_look(module, name), None)
            if _is_small(seen.tensor):
                # Batch normalisation writes its statistics past the version counter: copied in any case.
                self._buffers.append(seen._replace(value=seen.tensor.detach().clone()))
            else:
                self._large_buffers.append(seen)

    def end_forward(self, saved: Iterable[Parameter]) -> None:
        """Close forward, in which autograd has saved the parameters `saved`.

        Raises:
            RuntimeError: if it changed a buffer of which no copy was made.
        """
        self._saved = list(saved)
        ids = list(map(id, self._saved))
        if ids != self._saved_ids:
            self._watch_unsaved(ids)
        self._wanted = self._want_gradients()
        for seen in self._large_buffers:
            tensor, version = _look(seen.module, seen.name)
            if tensor is not seen.tensor or version != seen.version:
                raise RuntimeError(
                    f"a layer's forward changes its buffer {seen.name!r}, of which no copy was made because it has "
                    f"{seen.tensor.nbytes} bytes (limit {_SMALL_BYTES}); recomputation would change it a second time. "
                    "Leave the layer out of layers=, or use enable_ckpt=False"
                )

    def _watch_unsaved(self, saved_ids: list[int]) -> None:
        places = self._all_places
        watched = set(map(id, self._parameters))
        tensors = _at(places.parameters)
        if not set(map(id, tensors)).issuperset(saved_ids):
            places.find()
            tensors = _at(places.parameters)
        unsaved = [(place, t) for place, t in zip(places.parameters, tensors, strict=True) if id(t) not in saved_ids]
        for place, tensor in unsaved:
            if id(tensor) not in watched:
                self._places = [*self._places, place]
                self._parameters.append(tensor)
                self._versions += _versions([tensor])
        places.unsaved = [place for place, _ in unsaved], saved_ids

    def _want_gradients(self) -> list[bool]:
        tensors = (*self._saved, *self._parameters)
        try:
            return list(map(_WANTS_GRADIENT, tensors))
        except AttributeError:  # None
            return [tensor is not None and tensor.requires_grad for tensor in tensors]

    def changed(self) -> str | None:
        """The first parameter or buffer that is not as it was; None where all are."""
        versions = _versions(self._parameters)
        if versions != self._versions:
            place = next(i for i, version in enumerate(versions) if version != self._versions[i])
            return f"its parameter {self._places[place][1]!r} has been modified by an inplace operation"
        if self._want_gradients() != self._wanted:  # autograd would save other tensors
            return "a parameter of it has been frozen or unfrozen"
        for (module, name), was in zip(self._places, self._parameters, strict=True):
            now = getattr(module(), name, None)
            # FSDP1 puts in new views for each pass, which are no parameters.
            if now is not was and Parameter in (type(now), type(was)):
                return f"its parameter {name!r} has been replaced"
        for seen in self._large_buffers:
            tensor, version = _look(seen.module, seen.name)
            if tensor is not seen.tensor or version != seen.version:
                return f"its buffer {seen.name!r} has been modified"
        return None

    def restored(self) -> contextlib.AbstractContextManager[None] | None:
        """Run a block with the small buffers as they were before forward; None where there are none."""
        return self._restored() if self._buffers else None

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for seen in self._buffers:
                module = seen.module()
                assert module is not None and seen.value is not None
                now = getattr(module, seen.name)
                stack.callback(setattr, module, seen.name, now)
                if now is seen.tensor:
                    stack.callback(now.data.copy_, now.detach().clone())
                    now.data.copy_(seen.value)
                else:
                    setattr(module, seen.name, seen.value.clone())
            yield


def _at(places: list[Place]) -> list[Any]:
    return [getattr(module(), name, None) for module, name in places]


def _versions(tensors: list[Any]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except (AttributeError, RuntimeError):  # None, which has none, or a tensor made in inference mode
        return [tensor._version if tensor is not None and not tensor.is_inference() else 0 for tensor in tensors]


def _look(module: weakref.ref[nn.Module], name: str) -> tuple[Any, int]:
    tensor = getattr(module(), name, None)
    return tensor, tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


def _is_small(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.nbytes < _SMALL_BYTES
