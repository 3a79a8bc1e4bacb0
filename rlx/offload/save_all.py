"""`save="all"`: offload every tensor that autograd saves in a layer, or in a region of code."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rlx.offload.runtime.pytree import tensors_in
from rlx.offload.runtime.session import Layer, LayerCall, OffloadSession
from rlx.offload.storage.offloader import OffloadedRange
from rlx.offload.storage.tensor_bytes import (
    KeptTensor,
    Packed,
    TensorLayout,
    is_parameter,
    is_plain,
    kept,
    modified_in_place,
    restore,
    size_bytes,
    storage_address,
)

# A region without layers is cut into layer calls of this many offloaded bytes each, so that backward can fetch ahead.
BYTES_PER_CALL = 64 << 20


class OffloadedTensor:
    """A saved tensor whose bytes are offloaded."""

    __slots__ = ("_call", "_layout", "_offloaded")

    def __init__(self, call: SaveAllCall, offloaded: OffloadedRange, tensor: Tensor) -> None:
        self._call = call
        self._offloaded = offloaded
        self._layout = TensorLayout(tensor)

    def restore(self) -> Tensor:
        layout = self._layout
        if not layout.is_untouched:
            raise modified_in_place(layout.shape, layout.dtype, layout.version, "but was written to after that")
        if self._call.begin_backward():
            self._call.prefetch()
        return layout.restore(*self._offloaded.on_device())


class SaveAllCall(LayerCall):
    """A layer call, or a part of a region, whose saved tensors on a type of device are offloaded, but for storages in `fixed`."""

    def __init__(self, session: OffloadSession, layer: Layer, device_type: str, fixed: frozenset[int]) -> None:
        super().__init__(session, layer)
        self._device_type = device_type
        self._fixed = fixed
        self.offloaded_bytes = 0

    def pack(self, tensor: Tensor) -> Packed:
        if is_parameter(tensor):
            return kept(tensor)
        if (address := storage_address(tensor)) in self._fixed:
            return KeptTensor(tensor)
        # Tangents that are all zeros may have no storage.
        if address and tensor.device.type == self._device_type and is_plain(tensor):
            offloaded = self.session.offload(tensor, self)
            if offloaded is not None:
                self.offloaded_bytes += offloaded.nbytes
                return OffloadedTensor(self, offloaded, tensor)
        self.layer.counters.kept_bytes += size_bytes(tensor)
        return KeptTensor(tensor)


def run_save_all(
    session: OffloadSession, layer: Layer, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a layer's forward and offload the tensors that it saves for backward.

    Note [tensors that `save="all"` never offloads]
    The layer's parameters and buffers stay on the device, and so do arguments that need no gradient, such as rotary tables
    and masks, which the model passes to every layer. The rule goes by storage, so that it also holds for views. A storage that
    an argument with a gradient uses as well is offloaded: `layer(x, x.detach())` does not keep `x`.
    """
    own, arguments = (*module.parameters(), *module.buffers()), tensors_in((args, kwargs))
    accelerators = {tensor.device.type for tensor in (*own, *arguments)} - {"cpu", "meta"}
    constant = {storage_address(tensor) for tensor in arguments if not tensor.requires_grad}
    constant -= {storage_address(tensor) for tensor in arguments if tensor.requires_grad}
    fixed = frozenset(constant.union(map(storage_address, own)) - {0})
    call = SaveAllCall(session, layer, accelerators.pop() if accelerators else "cpu", fixed)
    with saved_tensors_hooks(call.pack, restore):
        return forward(*args, **kwargs)


class RegionHooks:
    """The pack hook of a region of code without layers. It begins a new layer call every `BYTES_PER_CALL`."""

    def __init__(self, session: OffloadSession) -> None:
        self._session = session
        accelerator = torch.accelerator.current_accelerator()
        self._device_type = accelerator.type if accelerator is not None else "cpu"
        self._layer = Layer(0, "region")
        session.layers.append(self._layer)
        self._call: Callable[[], SaveAllCall | None] = lambda: None

    def pack(self, tensor: Tensor) -> Packed:
        call = self._call()
        if call is None or call.offloaded_bytes >= BYTES_PER_CALL:
            call = SaveAllCall(self._session, self._layer, self._device_type, frozenset())
            self._call = weakref.ref(call)
        return call.pack(tensor)
