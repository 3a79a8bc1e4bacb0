"""What was noted of a buffer or an attribute at the start of a layer's forward, and how a recomputation gets it back.

Note [attributes]
A forward also reads plain attributes: `layer.mask = mask`, set by the model before each forward, or `weight`, which the
hook of a spectral normalisation sets. Tensors, simple values (numbers, strings, None) and the states of random generators are
noted. Lists and other objects in attributes of modules are not: they may hold a graph, which holds the layer's call. For the
same reason a tensor with a gradient is noted as an alias without its graph. A large one that forward itself replaces is dropped
when forward has ended: mostly it is the last result, kept for a look at it, and would take memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.offload.recompute.stash import StashedTensor
from rlx.offload.storage.regions import is_parameter, size_bytes

SMALL_BYTES = 1 << 20
BY_VALUE = frozenset({Tensor, torch.Generator})  # what they hold is noted
NOTED = BY_VALUE | {type(None), bool, int, float, str}
MISSING = object()


class Copied(NamedTuple):
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


class Kept(NamedTuple):
    """A buffer that is large or has no strided layout."""

    tensor: Tensor
    version: int

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        """Put the tensor in place."""
        place[name] = self.tensor


class Drawing(NamedTuple):
    """A random generator of the layer's own, and its state."""

    generator: torch.Generator
    state: Tensor

    def restore(self, place: dict[str, Any], name: str, undo: list[Callable[[], Any]]) -> None:
        """Put the generator in place, in the state that it had."""
        undo.append(partial(self.generator.set_state, self.generator.get_state()))
        self.generator.set_state(self.state)
        place[name] = self.generator


class Aliased(NamedTuple):
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


_RESTORED = (Copied, Kept, Aliased, Drawing)


def noted_buffer(tensor: Any) -> Copied | Aliased | Kept | None:
    """Note a buffer; None for a name without a tensor."""
    if not isinstance(tensor, Tensor):
        return None
    if not _is_small(tensor):
        return Kept(tensor, version_of(tensor))
    return Aliased(weakref.ref(tensor), StashedTensor(tensor, None)) if tensor.requires_grad else _copied(tensor)


def noted_attribute(value: Any) -> Copied | Aliased | Drawing:
    """Note a tensor or a random generator."""
    if isinstance(value, torch.Generator):
        return Drawing(value, value.get_state())
    if _is_small(value) and not value.requires_grad:
        return _copied(value)
    return Aliased(weakref.ref(value), StashedTensor(value, None))


def restore(
    place: MutableMapping[str, Any], before: dict[str, Any], noted: dict[str, Any], undo: list[Callable[[], Any]]
) -> None:
    """Let a dict of attributes or buffers, which holds `before`, hold what was noted of it, and no other tensors."""
    for name, was in noted.items():
        if type(was) in _RESTORED:
            was.restore(place, name, undo)
        elif before.get(name, MISSING) is not was:
            place[name] = was
    if Tensor in map(type, before.values()):
        for name, value in before.items():
            if type(value) is Tensor and name not in noted and not is_sharded(value):
                del place[name]


def fill(held: Any, content: Any) -> None:
    """Let a list, deque, set or mapping hold what it held before."""
    held.clear()
    if isinstance(held, list | deque):
        held.extend(content)
    else:
        held.update(content)


def is_sharded(value: Any) -> bool:
    """Whether a value is a parameter or a view of one: FSDP1 sets views as attributes, others in each pass."""
    return isinstance(value, Tensor) and is_parameter(value)


def version_of(tensor: Tensor) -> int:
    """Return the number of writes that autograd has seen; 0 for a tensor of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.nbytes < SMALL_BYTES


def _copied(tensor: Tensor) -> Copied:
    return Copied(tensor, tensor.detach().clone())


def _can_be_written(tensor: Tensor, value: Tensor) -> bool:
    """Whether `value` can be copied into a tensor: not into an expanded one, nor into one that was resized."""
    return (
        tensor.shape == value.shape
        and tensor.dtype == value.dtype
        and not tensor.is_inference()
        and (0 not in tensor.stride() or tensor.is_contiguous())
    )
