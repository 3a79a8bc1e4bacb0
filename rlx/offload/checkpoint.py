"""`save="boundary"`: a layer keeps its inputs, off the device, and is recomputed when backward comes to it.

Written on saved-tensor hooks alone. In forward every tensor that autograd saves is replaced by a `Slot` that holds
nothing but its place in the order. The first slot that backward asks for runs the layer's forward again, under hooks that
fill the slots in the same order and stop it after the last one: the operations behind it are not repeated. A slot
gives its tensor away once; asked again (a retained graph) it recomputes again.

The idea of filling numbered holders by a second forward that stops early is that of torch's non-reentrant checkpoint
(torch/utils/checkpoint.py); this one differs in that layer inputs may leave the device, keyword tensors included, that a
write to a saved tensor is an error as in plain autograd, and that one without randomness repeats no random state.

Note [writes to saved tensors]
Each slot watches the version counter of the tensor it stands for, of whose memory nothing is left. So a write after the
save raises whether it is done inside the layer, behind the operation with which recomputation stops, or outside on the
layer's output. The layer's inputs are watched too: a layer that writes to its own input cannot be run twice, and says so
at the end of forward. An input written to after the layer has ended is harmless if its bytes have left before.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from rlx.offload.ambient import Ambient, buffers_restored
from rlx.offload.engine import Engine, Layer, LayerCall, map_leaves, tensors_in
from rlx.offload.identity import Layout, Probe, is_parameter, is_plain, modified_in_place, size_bytes, span_bytes
from rlx.offload.saving import unpack
from rlx.offload.stats import mark
from rlx.offload.transfer import Parked


class RecomputeError(RuntimeError):
    """Recomputing a layer did not do what its forward did."""


class _EnoughRecomputedError(BaseException):
    """Ends a recomputation. Not an Exception, so that no layer that catches those can swallow it."""


class Slot:
    """What autograd holds instead of a tensor saved in a recomputed layer."""

    __slots__ = ("__weakref__", "_call", "_probe", "dtype", "shape", "value")

    def __init__(self, call: RecomputedCall, tensor: Tensor) -> None:
        self._call = call
        self._probe = Probe(tensor) if is_plain(tensor) else None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.value: Tensor | None = None

    def restore(self) -> Tensor:
        """The tensor, recomputed; RuntimeError if the original was written to after the save."""
        if self._probe is not None and not self._probe.is_untouched:
            raise modified_in_place(self.shape, self.dtype, self._probe.version, "but was written to after that")
        return self._call.take(self)


class _Input:
    """A tensor among a layer's inputs, for as long as the layer may be recomputed."""

    __slots__ = ("_kept", "_layout", "_parked", "_probe", "_requires_grad", "_version")

    def __init__(self, tensor: Tensor, parked: Parked | None) -> None:
        self._requires_grad = tensor.requires_grad
        self._parked = parked
        self._kept: Tensor | None = None
        if parked is None:
            self._kept = tensor if isinstance(tensor, Parameter) else tensor.detach()
            self._version = None if tensor.is_inference() else tensor._version
        else:
            self._layout = Layout.of(tensor)
            self._probe = Probe(tensor)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been written to the tensor since the layer got it."""
        if self._kept is None:
            return self._probe.is_untouched
        return self._version is None or self._kept._version == self._version

    def tensor(self) -> Tensor:
        """The tensor for a recomputation: a leaf that wants a gradient where the original did."""
        if self._parked is not None:
            storage, first_byte = self._parked.on_device()
            return self._layout.on(storage, first_byte).requires_grad_(self._requires_grad)
        assert self._kept is not None
        if not self.is_untouched:
            raise RuntimeError(
                f"a {self._kept.dtype} tensor of shape {list(self._kept.shape)}, an input of a layer that has to be "
                "recomputed, has been modified by an inplace operation since; write out of place, or clone it before"
            )
        if isinstance(self._kept, Parameter):
            return self._kept
        return self._kept.detach().requires_grad_(self._requires_grad)


class RecomputedCall(LayerCall):
    """One forward call of a layer that backward will repeat.

    Args:
        engine: where the inputs go.
        layer: which place in the model this is.
        module: the layer.
        forward: its forward, bound.
        args, kwargs: the call's arguments; tensors in nested tuples, lists and dicts are found.
        tensors: those of the arguments.
        recompute_context: entered around each recomputation.
    """

    def __init__(
        self,
        engine: Engine,
        layer: Layer,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        recompute_context: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        super().__init__(engine, layer)
        self._module = module
        self._was_training = module.training
        self._forward = forward
        self._recompute_context = recompute_context
        self._slots: list[weakref.ref[Slot]] = []
        self._taken = 0
        self._has_ended = False
        self._lock = threading.Lock()
        self._inputs: dict[int, _Input] = {}
        accelerators = dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta"))
        self._device = next(iter(accelerators), None)
        self._args, self._kwargs = map_leaves(self._save_input, (args, kwargs))
        self._inputs_in_order = tuple(self._inputs.values())
        self._inputs.clear()  # its keys are ids of tensors that only the caller keeps alive
        self._ambient = Ambient(accelerators)

    def pack(self, tensor: Tensor) -> Slot:
        """The pack hook of forward."""
        slot = Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def end_forward(self) -> None:
        """Close forward.

        Raises:
            RuntimeError: if the layer wrote to one of its inputs, of which recomputation would see the new value.
        """
        self._has_ended = True
        self._ambient.end_forward()
        if not all(saved.is_untouched for saved in self._inputs_in_order):
            raise RuntimeError(
                f"layer {self.layer.name} modifies one of its inputs by an inplace operation and can therefore not be "
                "recomputed; write out of place in the layer, or use enable_ckpt=False"
            )

    def take(self, slot: Slot) -> Tensor:
        """The tensor of a slot; recomputes the layer if it is not there."""
        if not self._has_ended:
            raise RecomputeError(
                f"layer {self.layer.name} runs a backward pass inside its own forward, of which not everything is "
                "known yet that has to be recomputed; use enable_ckpt=False, or leave the layer out of layers="
            )
        with self._lock:
            if slot.value is None:
                self._recompute()
                self._taken = 0
            value, slot.value = slot.value, None
            assert value is not None
            self._taken += 1
        if self.engine.options.prefetch_layers is None and 2 * self._taken >= len(self._slots):
            self.prefetch(1)
        return value

    def _save_input(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        # The same object stays the same object: layers ask `query is key`.
        saved = self._inputs.get(id(tensor))
        if saved is None:
            parked = self.park(tensor) if self._may_leave(tensor) else None
            if parked is None and not is_parameter(tensor):
                self.layer.counters.kept_bytes += size_bytes(tensor)
            saved = self._inputs[id(tensor)] = _Input(tensor, parked)
        return saved

    def _may_leave(self, tensor: Tensor) -> bool:
        # What wants no gradient (masks, rotary tables) is as a rule shared by all layers and stays alive anyway.
        if not tensor.requires_grad or is_parameter(tensor) or not is_plain(tensor):
            return False
        if tensor.device.type == "meta" or (tensor.device.type == "cpu" and self._device is not None):
            return False
        start, stop = span_bytes(tensor)
        return stop - start >= max(self.engine.options.min_bytes, 1)

    def _recompute(self) -> None:
        if self._module.training != self._was_training:
            raise RecomputeError(
                f"layer {self.layer.name} was in {'training' if self._was_training else 'evaluation'} mode in forward "
                "and is not in backward, which has to recompute it; switch modes between steps only"
            )
        self.begin_backward()
        stream = torch.accelerator.current_stream(self._device) if self._device is not None else None
        tensors = {id(saved): saved.tensor() for saved in self._inputs_in_order}
        args, kwargs = map_leaves(lambda leaf: tensors.get(id(leaf), leaf), (self._args, self._kwargs))
        if self.engine.options.prefetch_layers is not None:
            self.prefetch(self.engine.options.prefetch_layers)
        start = mark(stream)
        self._fill_slots(args, kwargs)
        self.engine.timeline.add("recomputed_ms", start, mark(stream), self.engine.counters, self.layer.counters)
        self.unload()

    def _fill_slots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        slots = [reference() for reference in self._slots]
        last = max(index for index, slot in enumerate(slots) if slot is not None)
        filled = 0

        def collect(tensor: Tensor) -> Tensor:
            nonlocal filled
            slot, value = slots[filled], tensor.detach()
            if slot is not None:
                if (slot.shape, slot.dtype) != (value.shape, value.dtype):
                    saved, found = f"{slot.dtype} {list(slot.shape)}", f"{value.dtype} {list(value.shape)}"
                    raise RecomputeError(self._differs(f"tensor {filled} was {saved} and is {found} now"))
                slot.value = value
            filled += 1
            if filled > last:
                raise _EnoughRecomputedError
            return value

        with (
            self._recompute_context(),
            self._ambient.restored(),
            buffers_restored(self._module),
            torch.enable_grad(),
            saved_tensors_hooks(collect, _same),
        ):
            try:
                self._forward(*args, **kwargs)
            except _EnoughRecomputedError:
                return
        raise RecomputeError(self._differs(f"{len(slots)} tensors were saved and {filled} are now"))

    def _differs(self, how: str) -> str:
        return (
            f"recomputing layer {self.layer.name} did not save the tensors that its forward saved: {how}; a layer that is "
            "recomputed must do the same each time: look for state that it changes, or randomness of its own"
        )


def run_recomputed(
    engine: Engine,
    layer: Layer,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recompute_context: Callable[[], contextlib.AbstractContextManager[None]],
) -> Any:
    """Run a layer's forward so that nothing but its inputs is kept, and backward repeats it."""
    tensors = tensors_in((args, kwargs))
    wants_gradient = any(tensor.requires_grad for tensor in tensors)
    if not wants_gradient and not any(parameter.requires_grad for parameter in module.parameters()):
        return forward(*args, **kwargs)
    call = RecomputedCall(engine, layer, module, forward, args, kwargs, tensors, recompute_context)
    with saved_tensors_hooks(call.pack, unpack):
        outputs = forward(*args, **kwargs)
    call.end_forward()
    return outputs


def _same(tensor: Tensor) -> Tensor:
    return tensor
