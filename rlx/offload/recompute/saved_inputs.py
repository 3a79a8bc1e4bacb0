"""Tensors that a recomputation reads again: a layer's inputs, and results of operations that it does not repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.runtime.pytree import replace_leaves
from rlx.offload.storage.offloader import Counters, OffloadedRange
from rlx.offload.storage.tensor_bytes import TensorLayout, is_parameter, size_bytes


class StashedTensor:
    """A tensor for as long as a layer may be recomputed: offloaded bytes, or an alias of a tensor on the device.

    It never holds the tensor itself, which would hold the graph that holds this object. A tensor that an operation of the layer
    computed (`is_result`) is no leaf if it requires a gradient, and the layer itself sets its attributes.
    """

    __slots__ = ("_attributes", "_is_leaf", "_layout", "_offloaded", "_requires_grad", "_version", "version_alias")

    def __init__(self, tensor: Tensor, offloaded: OffloadedRange | None, is_result: bool = False) -> None:
        self._requires_grad = tensor.requires_grad
        self._is_leaf = tensor.is_leaf and not (is_result and self._requires_grad)
        self._attributes = None if is_result or not vars(tensor) else dict(vars(tensor))  # `mask.scale = 1.5` set one
        self._offloaded = offloaded
        self._layout: TensorLayout | None = None
        self._version: int | None
        self.version_alias: Tensor  # shares the tensor's version counter
        if offloaded is None:
            self._version = None if tensor.is_inference() else tensor._version
            self.version_alias = tensor if isinstance(tensor, Parameter) else tensor.detach()
        else:
            self._layout = layout = TensorLayout(tensor)
            self._version, self.version_alias = layout.version, layout.alias

    @property
    def is_grad_leaf(self) -> bool:
        return self._is_leaf and self._requires_grad

    @property
    def is_untouched(self) -> bool:
        return self._version is None or self.version_alias._version == self._version

    @property
    def is_whole(self) -> bool:
        """Whether the stashed bytes are still the original ones. A write after the copy to the host does not change them."""
        return self.is_untouched if self._offloaded is None else not self._offloaded.is_torn

    def tensor(self) -> Tensor:
        """Return the tensor, with the original's attributes, gradient mode only; RuntimeError if it was overwritten."""
        if self._offloaded is not None and self._layout is not None:
            tensor = self._layout.restore(*self._offloaded.on_device())
        elif not self.is_untouched:
            raise modified_input(self.version_alias)
        elif isinstance(self.version_alias, Parameter):
            return self.version_alias
        else:
            tensor = self.version_alias.detach()
        tensor.requires_grad_(self._requires_grad)
        if not self._is_leaf:
            tensor = _view(tensor)
        if self._attributes is not None:
            # A subclass may keep its parts as attributes; the restored tensor has its own.
            parts = {name: part for name, part in vars(tensor).items() if isinstance(part, Tensor)}
            vars(tensor).update(self._attributes | parts)
        return tensor


def _view(tensor: Tensor) -> Tensor:
    """Return a tensor with the same strides, also for a dimension of length 1, that is no leaf."""
    try:
        return tensor.expand_as(tensor)
    except RuntimeError:  # sparse and nested layouts
        return tensor.clone()


class LayerInputs:
    """The arguments of one layer call, until the layer is recomputed; `alias_by_base` gets their aliases (see `SavedSlots`).

    A tensor that requires a gradient or has attributes is stashed, offloaded unless `offload` returns None. Any other (a mask, a
    rotary table) is kept on the device: layers mostly share it, so that it stays alive anyway.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        offload: Callable[[Tensor], OffloadedRange | None],
        counters: Counters,
        alias_by_base: dict[int, Tensor],
    ) -> None:
        self._stashed: list[StashedTensor] = []
        self._constants: list[tuple[Tensor, int]] = []  # aliases of tensors without a gradient, and their versions
        by_id: dict[int, StashedTensor | Tensor] = {}  # each object once: a layer may ask whether `query is key`
        for tensor in tensors:
            if id(tensor) in by_id:
                continue
            alias: Tensor | None = None
            if not tensor.requires_grad:
                counters.kept_bytes += size_bytes(tensor)
            if tensor.requires_grad or vars(tensor):
                offloaded = offload(tensor) if tensor.requires_grad and not is_parameter(tensor) else None
                stashed = by_id[id(tensor)] = StashedTensor(tensor, offloaded)
                self._stashed.append(stashed)
                if type(tensor) is Tensor and not tensor.is_inference():
                    alias = stashed.version_alias
            else:
                kept = by_id[id(tensor)] = tensor
                if tensor.is_inference():
                    continue
                if type(tensor) is Tensor:
                    # An alias, because a tensor to which the layer's output is added in place holds the graph, which holds this.
                    alias = kept = by_id[id(tensor)] = tensor.detach()
                self._constants.append((kept, tensor._version))
            if alias is not None:
                base = tensor._base
                alias_by_base[id(tensor if base is None else base)] = alias
        self._arguments = replace_leaves((args, kwargs), by_id)

    @property
    def has_grad_leaves(self) -> bool:
        return any(stashed.is_grad_leaf for stashed in self._stashed)

    @property
    def is_untouched(self) -> bool:
        return self.written_constant() is None and all(stashed.is_untouched for stashed in self._stashed)

    def written_constant(self) -> Tensor | None:
        """Return an input without a gradient that has been written to; None if there is none."""
        for tensor, version in self._constants:
            if tensor._version != version:
                return tensor
        return None

    def restored(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Return the arguments for a recomputation, and the tensors that were made for it; RuntimeError if one was overwritten."""
        tensors: dict[int, Tensor] = {}
        for stashed in self._stashed:
            tensors[id(stashed)] = stashed.tensor()
        for kept, _ in self._constants:
            if kept.requires_grad:
                tensors[id(kept)] = kept.detach()
        args, kwargs = replace_leaves(self._arguments, tensors)
        return args, kwargs, list(tensors.values())


def release_leaf_memory(tensor: Tensor) -> None:
    """Free the memory of the leaf that an input is a view of: the graph of a recomputation holds the leaf."""
    leaf = tensor._base
    if leaf is not None and type(leaf) is Tensor and leaf.requires_grad and leaf.is_leaf:
        with contextlib.suppress(RuntimeError):  # sparse and nested tensors keep theirs until the graph goes
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)


def modified_input(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a {tensor.dtype} tensor of shape {list(tensor.shape)}, an input of a layer that has to be recomputed, has been "
        "modified by an inplace operation since; write out of place, or clone it before"
    )
