"""Tensors that recomputation needs again: a layer's inputs, and the results of operations that it does not repeat."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from rlx.offload.identity import Look
from rlx.offload.transfer import Parked


class Stored:
    """A tensor for as long as a layer may be recomputed: its bytes off the device, or an alias where they stayed.

    Holds an alias and never the tensor itself, which would hold the graph that holds this.

    Args:
        tensor: shape, dtype and layout are given back as they are.
        parked: its bytes off the device; None: they stay.
    """

    __slots__ = ("_look", "_parked", "_requires_grad", "_version", "watch")

    def __init__(self, tensor: Tensor, parked: Parked | None) -> None:
        self._requires_grad = tensor.requires_grad
        self._parked = parked
        self._look: Look | None = None
        self._version: int | None
        # What shares the tensor's version counter for as long as this lives.
        self.watch: Tensor
        if parked is None:
            self._version = None if tensor.is_inference() else tensor._version
            self.watch = tensor if isinstance(tensor, Parameter) else tensor.detach()
        else:
            self._look = look = Look(tensor)
            self._version, self.watch = look.version, look.alias

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been written to the tensor since."""
        return self._version is None or self.watch._version == self._version

    @property
    def is_whole(self) -> bool:
        """Whether the bytes are still those that were stored: what has left before a write is."""
        return self.is_untouched if self._parked is None else not self._parked.is_torn

    def tensor(self) -> Tensor:
        """The tensor, ready for the current stream; it wants a gradient where the original did. In gradient mode only.

        Raises:
            RuntimeError: if the bytes were overwritten.
        """
        if self._parked is not None and self._look is not None:
            return self._look.on(*self._parked.on_device(), wants_gradient=self._requires_grad)
        kept = self.watch
        if not self.is_untouched:
            raise modified_input(kept)
        if isinstance(kept, Parameter):
            return kept
        return kept.detach().requires_grad_(self._requires_grad)


def modified_input(tensor: Tensor) -> RuntimeError:
    """The error for a layer input that was written to before the layer is recomputed."""
    return RuntimeError(
        f"a {tensor.dtype} tensor of shape {list(tensor.shape)}, an input of a layer that has to be recomputed, has been "
        "modified by an inplace operation since; write out of place, or clone it before"
    )
