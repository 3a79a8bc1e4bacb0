"""Tensors that recomputation needs again: a layer's inputs, and the results of operations that it does not repeat."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.storage.offloader import OffloadedRange
from rlx.offload.storage.regions import TensorLayout


class StashedTensor:
    """A tensor for as long as a layer may be recomputed: its bytes off the device, or an alias where they stayed.

    Holds an alias and never the tensor itself, which would hold the graph that holds this.

    Args:
        tensor: shape, dtype and layout are given back as they are.
        offloaded: its bytes off the device; None: they stay.
        is_result: it, or what it is an alias of, is what an operation gave: no leaf, if it wants a gradient.
    """

    __slots__ = ("_is_leaf", "_look", "_offloaded", "_requires_grad", "_version", "watch")

    def __init__(self, tensor: Tensor, offloaded: OffloadedRange | None, is_result: bool = False) -> None:
        self._requires_grad = tensor.requires_grad
        self._is_leaf = tensor.is_leaf and not (is_result and self._requires_grad)
        self._offloaded = offloaded
        self._look: TensorLayout | None = None
        self._version: int | None
        # What shares the tensor's version counter for as long as this lives.
        self.watch: Tensor
        if offloaded is None:
            self._version = None if tensor.is_inference() else tensor._version
            self.watch = tensor if isinstance(tensor, Parameter) else tensor.detach()
        else:
            self._look = look = TensorLayout(tensor)
            self._version, self.watch = look.version, look.alias

    @property
    def is_given_as_leaf(self) -> bool:
        """Whether `tensor()` is a leaf that the graph of a recomputation holds."""
        return self._is_leaf and self._requires_grad

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been written to the tensor since."""
        return self._version is None or self.watch._version == self._version

    @property
    def is_whole(self) -> bool:
        """Whether the bytes are still those that were stored: what has left before a write is."""
        return self.is_untouched if self._offloaded is None else not self._offloaded.is_torn

    def tensor(self) -> Tensor:
        """The tensor, ready for the current stream. In gradient mode only.

        It wants a gradient where the original did, and is a leaf where that was one: layers may ask.

        Raises:
            RuntimeError: if the bytes were overwritten.
        """
        if self._offloaded is not None and self._look is not None:
            tensor = self._look.restore(*self._offloaded.on_device())
        else:
            if not self.is_untouched:
                raise modified_input(self.watch)
            if isinstance(self.watch, Parameter):
                return self.watch
            tensor = self.watch.detach()
        tensor.requires_grad_(self._requires_grad)
        # Else a view, of the same strides even where these say nothing.
        return tensor if self._is_leaf else tensor.expand_as(tensor)


def release_leaf_memory(tensor: Tensor) -> None:
    """Take the memory from the leaf that a given tensor looks at: the graph of a recomputation holds it for as long as it lives."""
    leaf = tensor._base
    if leaf is not None and type(leaf) is Tensor and leaf.requires_grad and leaf.is_leaf:
        with contextlib.suppress(RuntimeError):  # of sparse and nested layouts: they stay a little longer
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)


def modified_input(tensor: Tensor) -> RuntimeError:
    """The error for a layer input that was written to before the layer is recomputed."""
    return RuntimeError(
        f"a {tensor.dtype} tensor of shape {list(tensor.shape)}, an input of a layer that has to be recomputed, has been "
        "modified by an inplace operation since; write out of place, or clone it before"
    )
