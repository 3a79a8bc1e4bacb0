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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from rlx.offload.ambient import Ambient
from rlx.offload.answers import Answer
from rlx.offload.engine import Engine, Layer, LayerCall, map_leaves
from rlx.offload.identity import is_parameter, is_plain, modified_in_place, size_bytes, span_bytes, without_memory
from rlx.offload.module_state import ModuleState, Places
from rlx.offload.replay import Replay, Watch
from rlx.offload.stats import mark
from rlx.offload.stored import Stored


class RecomputeError(RuntimeError):
    """Recomputing a layer did not do what its forward did."""


class _EnoughRecomputedError(BaseException):
    """Ends a recomputation. Not an Exception, so that no layer that catches those can swallow it."""


class Slot:
    """What autograd holds instead of a tensor saved in a recomputed layer."""

    # Filled in by `RecomputedCall.packer`, for which a call of __init__ would take a third of its time.
    __slots__ = ("__weakref__", "alias", "call", "dtype", "index", "shape", "value", "version")

    alias: Tensor | None  # watches the version counter: without memory, or a parameter itself; None: cannot be watched
    call: RecomputedCall
    dtype: torch.dtype
    index: int
    shape: torch.Size | None  # None: a nested tensor, which has none
    value: Tensor | None
    version: int

    def restore(self) -> Tensor:
        """The tensor, recomputed; RuntimeError if the original was written to after the save."""
        alias = self.alias
        if alias is not None and alias._version != self.version:
            raise modified_in_place(self.shape or (), self.dtype, self.version, "but was written to after that")
        value = self.value
        if value is None:
            value = self.call.recompute(self)
        self.value = None
        if self.index < self.call.prefetch_below:
            self.call.prefetch(1)
        return value


class Repeatable(NamedTuple):
    """A layer as recomputation needs it.

    Args:
        module: the layer.
        forward: its forward, bound.
        places: where it keeps parameters and buffers.
        context: entered around each recomputation.
    """

    module: nn.Module
    forward: Callable[..., Any]
    places: Places
    context: Callable[[], contextlib.AbstractContextManager[None]]


class RecomputedCall(LayerCall):
    """One forward call of a layer that backward will repeat.

    Args:
        engine: where the inputs go.
        layer: which place in the model this is.
        repeatable: what to repeat.
        args, kwargs: the call's arguments; tensors in nested tuples, lists and dicts are found.
        tensors: those of the arguments.
    """

    def __init__(
        self,
        engine: Engine,
        layer: Layer,
        repeatable: Repeatable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> None:
        super().__init__(engine, layer)
        self.prefetch_below = 0  # backward fetches ahead when it comes to a slot before this one
        self.seen: list[Tensor] | None = None
        self.parameters: list[Tensor] = []  # those that autograd has saved
        self._repeatable = repeatable
        self._was_training = repeatable.module.training
        self._state = ModuleState(repeatable.places)
        self._slots: list[weakref.ref[Slot]] = []
        self._attention_slots: int | None = None
        self._has_ended = False
        self._lock = threading.Lock()
        self._inputs: dict[int, Stored] = {}
        self._answers: list[Answer | None] = []
        accelerators = dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta"))
        self._device = next(iter(accelerators), None)
        self._args, self._kwargs = map_leaves(self._store_input, (args, kwargs))
        self._inputs_in_order = tuple(self._inputs.values())
        self._inputs.clear()  # its keys are ids of tensors that only the caller keeps alive
        self._ambient = Ambient(accelerators)

    def packer(self) -> Callable[[Tensor], Slot]:
        """The pack hook of forward. Called for every saved tensor, so it is written for speed."""
        slots, weak = self._slots, weakref.ref

        def pack(tensor: Tensor) -> Slot:
            slot = Slot()
            slot.call = self
            slot.index = len(slots)
            slot.shape = tensor.shape if not tensor.is_nested else None
            slot.dtype = tensor.dtype
            slot.value = slot.alias = None
            base = tensor._base
            if base is None:
                base = tensor
            try:
                if type(base) is Parameter:
                    slot.version = base._version
                    slot.alias = base
                    self.parameters.append(base)
                elif type(tensor) is Tensor:
                    slot.version = tensor._version
                    slot.alias = without_memory(tensor)
            except RuntimeError:  # inference tensors, sparse and nested layouts
                slot.alias = None
            slots.append(weak(slot))
            if self.seen is not None:
                self.seen.append(tensor)
            return slot

        return pack

    @property
    def slot_count(self) -> int:
        """How many tensors autograd has saved so far."""
        return len(self._slots)

    def random_state(self) -> tuple[Tensor, ...]:
        """The state of the random generators."""
        return self._ambient.random_state()

    def store(self, tensor: Tensor) -> Stored | None:
        """Send a tensor off, or keep it if it is small; None where the host has no room for it."""
        parked = self.park(tensor) if self._may_leave(tensor) else None
        if parked is None:
            if size_bytes(tensor) >= max(self.engine.options.min_bytes, 1):
                return None
            self.layer.counters.kept_bytes += size_bytes(tensor)
        return Stored(tensor, parked)

    def leave_forward(self) -> None:
        """Note that forward has ended, also by an exception."""
        self._ambient.leave_forward()

    def end_forward(self, watch: Watch | None) -> None:
        """Close forward.

        Raises:
            RuntimeError: if the layer wrote to one of its inputs, of which recomputation would see the new value.
        """
        if watch is not None:
            watch.end_forward()
            self._answers = watch.answers
            self._attention_slots = watch.attention_slots
        self._has_ended = True
        self._state.end_forward(self.parameters)
        self.parameters.clear()
        self._ambient.end_forward()
        if not all(stored.is_untouched for stored in self._inputs_in_order):
            raise RuntimeError(
                f"layer {self.layer.name} modifies one of its inputs by an inplace operation and can therefore not be "
                "recomputed; write out of place in the layer, or use enable_ckpt=False"
            )

    def recompute(self, slot: Slot) -> Tensor:
        """The tensor of a slot that is empty: recomputes the layer, which fills all its slots."""
        if not self._has_ended:
            raise RecomputeError(
                f"layer {self.layer.name} runs a backward pass inside its own forward, of which not everything is "
                "known yet that has to be recomputed; use enable_ckpt=False, or leave the layer out of layers="
            )
        with self._lock:
            value = slot.value
            if value is None:
                self._recompute()
                value = slot.value
            assert value is not None
            return value

    def _store_input(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        # The same object stays the same object: layers ask `query is key`.
        stored = self._inputs.get(id(tensor))
        if stored is None:
            parked = None
            if not is_parameter(tensor):
                # What wants no gradient (masks, rotary tables) is as a rule shared by all layers and stays alive anyway.
                parked = self.park(tensor) if tensor.requires_grad and self._may_leave(tensor) else None
                if parked is None:
                    self.layer.counters.kept_bytes += size_bytes(tensor)
            stored = self._inputs[id(tensor)] = Stored(tensor, parked)
        return stored

    def _may_leave(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or tensor.device.type == "meta":
            return False
        if tensor.device.type == "cpu" and self._device is not None:
            return False
        start, stop = span_bytes(tensor)
        return stop - start >= max(self.engine.options.min_bytes, 1)

    def _recompute(self) -> None:
        if self._repeatable.module.training != self._was_training:
            raise RecomputeError(
                f"layer {self.layer.name} was in {'training' if self._was_training else 'evaluation'} mode in forward "
                "and is not in backward, which has to recompute it; switch modes between steps only"
            )
        changed = self._state.changed()
        if changed is not None:
            self._refuse(changed)
        self.begin_backward()
        stream = torch.accelerator.current_stream(self._device) if self._device is not None else None
        tensors = {stored: stored.tensor() for stored in self._inputs_in_order}
        args, kwargs = map_leaves(
            lambda leaf: tensors[leaf] if type(leaf) is Stored else leaf, (self._args, self._kwargs)
        )
        layers = self.engine.options.prefetch_layers
        if layers is not None:
            self.prefetch(layers)
        elif self._attention_slots is not None:
            self.prefetch_below = self._attention_slots
        else:
            self.prefetch_below = (len(self._slots) + 1) // 2
        start = mark(stream)
        self._fill_slots(args, kwargs)
        self.engine.timeline.add("recomputed_ms", start, mark(stream), self.engine.counters, self.layer.counters)
        self.unload()

    def _fill_slots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        slots = [reference() for reference in self._slots]
        last = max(index for index, slot in enumerate(slots) if slot is not None)
        filled = 0

        def collect(tensor: Tensor) -> Tensor:
            slot = slots[filled]
            if slot is not None:
                self._check_parameter(slot, tensor)
            return fill(tensor)

        def fill(tensor: Tensor) -> Tensor:
            nonlocal filled
            slot, value = slots[filled], tensor.detach()
            if slot is not None:
                shape = value.shape if not value.is_nested else None
                if slot.shape != shape or slot.dtype != value.dtype:
                    saved, found = f"{slot.dtype} {slot.shape}", f"{value.dtype} {shape}"
                    raise RecomputeError(self._differs(f"tensor {filled} was {saved} and is {found} now"))
                slot.value = value
            filled += 1
            if filled > last:
                raise _EnoughRecomputedError
            return value

        def answer(first_slot: int, tensors: list[Tensor]) -> None:
            if first_slot != filled:
                raise RecomputeError(self._differs(f"{first_slot} tensors were saved and {filled} are at this point"))
            for tensor in tensors:
                fill(tensor)

        with (
            self._repeatable.context(),
            self._ambient.restored(),
            self._state.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(collect, _same),
            # Also without answers: a compiled part is traced anew where the modes are not those of forward.
            Replay(self._answers, answer, self._ambient.skip_to, self._error)
            if self.engine.save == "attention"
            else contextlib.nullcontext(),
        ):
            try:
                self._repeatable.forward(*args, **kwargs)
            except _EnoughRecomputedError:
                return
        if filled > last:  # the layer has swallowed the exception
            return
        raise RecomputeError(self._differs(f"{len(slots)} tensors were saved and {filled} are now"))

    def _check_parameter(self, slot: Slot, tensor: Tensor) -> None:
        """Refuse a parameter in place of which forward saw another one, or another value."""
        base, was = tensor._base, slot.alias
        if base is None:
            base = tensor
        if type(base) is Parameter or type(was) is Parameter:
            if base is not was:
                self._refuse(f"a parameter of shape {list(tensor.shape)} has been replaced")
            if base._version != slot.version:
                self._refuse(f"a parameter of shape {list(tensor.shape)} has been modified by an inplace operation")

    def _refuse(self, changed: str) -> None:
        raise RecomputeError(
            f"layer {self.layer.name} has to be recomputed, but since its forward {changed}, so that gradients would be "
            "wrong; change parameters and buffers only when no backward is left to do, or use enable_ckpt=False"
        )

    def _error(self, how: str) -> RecomputeError:
        return RecomputeError(self._differs(how))

    def _differs(self, how: str) -> str:
        return (
            f"recomputing layer {self.layer.name} did not save the tensors that its forward saved: {how}; a layer that is "
            "recomputed must do the same each time: look for state that it changes, or randomness of its own"
        )


def run_recomputed(
    engine: Engine,
    layer: Layer,
    repeatable: Repeatable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
) -> Any:
    """Run a layer's forward so that only its inputs and, with `save="attention"`, answers are kept.

    `tensors` are those among the arguments.
    """
    wants_gradient = any(tensor.requires_grad for tensor in tensors)
    if not wants_gradient and not any(parameter.requires_grad for parameter in repeatable.module.parameters()):
        return repeatable.forward(*args, **kwargs)
    call = RecomputedCall(engine, layer, repeatable, args, kwargs, tensors)
    watch = Watch(call, layer.attention_count) if engine.save == "attention" else None
    try:
        with saved_tensors_hooks(call.packer(), Slot.restore), watch or contextlib.nullcontext():
            outputs = repeatable.forward(*args, **kwargs)
    finally:
        call.leave_forward()
    call.end_forward(watch)
    if watch is None:
        return outputs
    layer.attention_count = watch.attention_count
    if not any(watch.answers):
        engine.note_fallback(layer, watch.refused or "calls no fused attention that is known")
    return outputs


def _same(tensor: Tensor) -> Tensor:
    return tensor
