"""Tensors that recomputation needs again: a layer's inputs, and the results of operations that it does not repeat."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.identity import Look, nothing_on
from rlx.offload.transfer import Parked


class Stored:
    """A tensor for as long as a layer may be recomputed: its bytes off the device, or an alias where they stayed.

    Holds an alias and never the tensor itself, which would hold the graph that holds this.

    Args:
        tensor: shape, dtype and layout are given back as they are.
        parked: its bytes off the device; None: they stay.
    """

    __slots__ = ("_kept", "_look", "_parked", "_requires_grad", "_version")

    def __init__(self, tensor: Tensor, parked: Parked | None) -> None:
        self._requires_grad = tensor.requires_grad
        self._parked = parked
        self._kept: Tensor | None = None
        if parked is None:
            self._kept = tensor if isinstance(tensor, Parameter) else tensor.detach()
            self._version = None if tensor.is_inference() else tensor._version
        else:
            self._look = Look(tensor)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been written to the tensor since."""
        if self._kept is None:
            return self._look.is_untouched
        return self._version is None or self._kept._version == self._version

    @property
    def watch(self) -> Tensor:
        """What shares the tensor's version counter for as long as this lives."""
        return self._look.alias if self._kept is None else self._kept

    @property
    def is_whole(self) -> bool:
        """Whether the bytes are still those that were stored: what has left before a write is."""
        return self.is_untouched if self._parked is None else not self._parked.is_torn

    def tensor(self) -> Tensor:
        """The tensor, ready for the current stream; it wants a gradient where the original did.

        Raises:
            RuntimeError: if the bytes were overwritten.
        """
        if self._parked is not None:
            tensor = self._look.on(*self._parked.on_device())
            return _on_empty_leaf(tensor) if self._requires_grad else tensor
        assert self._kept is not None
        if not self.is_untouched:
            raise modified_input(self._kept)
        if isinstance(self._kept, Parameter):
            return self._kept
        return self._kept.detach().requires_grad_(self._requires_grad)


def _on_empty_leaf(tensor: Tensor) -> Tensor:
    """A tensor that wants a gradient and that no graph built on it keeps: graphs keep their leaves, so that is another one.

    Else what recomputation saves for the end of a layer would keep the layer's input until it has been asked for.
    """
    with torch.enable_grad():
        look = tensor.requires_grad_().view_as(tensor)
    tensor.data = nothing_on(tensor.device)
    return look


def modified_input(tensor: Tensor) -> RuntimeError:
    """The error for a layer input that was written to before the layer is recomputed."""
    return RuntimeError(
        f"a {tensor.dtype} tensor of shape {list(tensor.shape)}, an input of a layer that has to be recomputed, has been "
        "modified by an inplace operation since; write out of place, or clone it before"
    )
