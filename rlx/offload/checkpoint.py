"""`save="boundary"`: a layer keeps its inputs, off the device, and is recomputed when backward comes to it.

Written on saved-tensor hooks alone. In forward every tensor that autograd saves is replaced by a `Slot` that holds
nothing but its place in the order. The first slot that backward asks for runs the layer's forward again, under hooks that
take its values in the same order and stop it after the last one: the operations behind it are not repeated. A value is
given away once; asked for again (a retained graph) the layer is recomputed again.

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
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

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
from rlx.offload.stored import Stored, modified_input


class RecomputeError(RuntimeError):
    """Recomputing a layer did not do what its forward did."""


class _EnoughRecomputedError(BaseException):
    """Ends a recomputation. Not an Exception, so that no layer that catches those can swallow it."""


# What autograd holds instead of a tensor saved in a recomputed layer: the call, the tensor's place in the order, what watches
# its version counter (a parameter itself, else an alias without memory; None: nothing can) and its version. A plain tuple,
# because there are dozens in each layer.
Slot = tuple["RecomputedCall", int, Tensor | None, int]


def restore(slot: Slot) -> Tensor:
    """The unpack hook: the tensor, recomputed; RuntimeError if the original was written to after the save."""
    call, index, watched, version = slot
    if watched is not None and watched._version != version:
        shape, dtype, *_ = call.expected[index]
        raise modified_in_place(shape or (), dtype, version, "but was written to after that")
    values = call.values
    value = values[index] if values else None
    if value is None:
        value = call.recompute(index)
        values = call.values
    if values:  # else another thread has moved on from this layer meanwhile
        values[index] = None
    if index < call.prefetch_below:
        call.prefetch_below = 0
        call.prefetch(1)
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
        args, kwargs: the call's arguments; tensors in nested tuples, lists, mappings and dataclasses are found.
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
        # Of each slot: the tensor's shape (None: nested tensors have none) and dtype, the parameter that it looks at, version.
        self.expected: list[tuple[torch.Size | None, torch.dtype, Tensor | None, int]] = []
        self.values: list[Tensor | None] = []  # of each slot, recomputed and not asked for yet
        self._attention_slots: int | None = None
        self._has_ended = False
        self._lock = threading.Lock()
        self._inputs: dict[int, Stored] = {}
        self._constants: list[tuple[Tensor, int]] = []  # inputs that want no gradient, and their versions
        self._answers: list[Answer | None] = []
        accelerators = dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta"))
        self._device = next(iter(accelerators), None)
        self._args, self._kwargs = map_leaves(self._store_input, (args, kwargs))
        self._inputs_in_order = tuple(self._inputs.values())
        self._inputs.clear()  # its keys are ids of tensors that only the caller keeps alive
        self._ambient = Ambient(accelerators)

    def packer(self) -> Callable[[Tensor], Slot]:
        """The pack hook of forward. Called for every saved tensor, so it is written for speed."""
        expected, parameters = self.expected, self.parameters

        def pack(tensor: Tensor) -> Slot:
            watched: Tensor | None = None
            parameter: Tensor | None = None
            shape: torch.Size | None = None
            version = 0
            base = tensor._base
            if base is None:
                base = tensor
            try:
                shape = tensor.shape
                if type(base) is Parameter:
                    version = base._version
                    watched = parameter = base
                    parameters.append(base)
                elif type(tensor) is Tensor:
                    version = tensor._version
                    watched = without_memory(tensor)
            except RuntimeError:  # inference tensors, sparse and nested layouts
                watched = None
            slot = (self, len(expected), watched, version)
            expected.append((shape, tensor.dtype, parameter, version))
            if self.seen is not None:
                self.seen.append(tensor)
            return slot

        return pack

    @property
    def slot_count(self) -> int:
        """How many tensors autograd has saved so far."""
        return len(self.expected)

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
        """Note that an exception has ended forward."""
        self._ambient.leave_forward()

    def end_forward(self, watch: Watch | None) -> None:
        """Close forward.

        Raises:
            RuntimeError: if the layer wrote to one of its inputs, of which recomputation would see the new value, or drew
                random numbers that cannot be repeated.
        """
        self._ambient.end_forward()
        if watch is not None:
            watch.end_forward()
            self._answers = watch.answers
            self._attention_slots = watch.attention_slots
        self._has_ended = True
        self._state.end_forward(self.parameters)
        self.parameters.clear()
        if self._written_constant() is not None or not all(stored.is_untouched for stored in self._inputs_in_order):
            raise RuntimeError(
                f"layer {self.layer.name} modifies one of its inputs by an inplace operation and can therefore not be "
                "recomputed; write out of place in the layer, or use enable_ckpt=False"
            )

    def recompute(self, index: int) -> Tensor:
        """The tensor of a slot whose value is not there: recomputes the layer, which gives those of all slots."""
        if not self._has_ended:
            raise RecomputeError(
                f"layer {self.layer.name} runs a backward pass inside its own forward, of which not everything is "
                "known yet that has to be recomputed; use enable_ckpt=False, or leave the layer out of layers="
            )
        with self._lock:
            values = self.values
            value = values[index] if values else None
            if value is None:
                value = self._recompute()[index]
            assert value is not None
            return value

    def unload(self, unless_parked_by: LayerCall | None = None) -> None:
        """Let go of what is on the device for this call: also values that nobody asked for, of a branch without a loss."""
        self.values = []
        super().unload(unless_parked_by)

    def _store_input(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.requires_grad:
            # Masks, rotary tables: shared by all layers as a rule, so that they stay alive anyway.
            self._constants.append((leaf, 0 if leaf.is_inference() else leaf._version))
            self.layer.counters.kept_bytes += size_bytes(leaf)
            return leaf
        # The same object stays the same object: layers ask `query is key`.
        stored = self._inputs.get(id(leaf))
        if stored is None:
            parked = None
            if not is_parameter(leaf):
                parked = self.park(leaf) if self._may_leave(leaf) else None
                if parked is None:
                    self.layer.counters.kept_bytes += size_bytes(leaf)
            stored = self._inputs[id(leaf)] = Stored(leaf, parked)
        return stored

    def _written_constant(self) -> Tensor | None:
        written = (t for t, version in self._constants if not t.is_inference() and t._version != version)
        return next(written, None)

    def _may_leave(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or tensor.device.type == "meta":
            return False
        if tensor.device.type == "cpu" and self._device is not None:
            return False
        start, stop = span_bytes(tensor)
        return stop - start >= max(self.engine.options.min_bytes, 1)

    def _recompute(self) -> list[Tensor | None]:
        if self._repeatable.module.training != self._was_training:
            raise RecomputeError(
                f"layer {self.layer.name} was in {'training' if self._was_training else 'evaluation'} mode in forward "
                "and is not in backward, which has to recompute it; switch modes between steps only"
            )
        changed = self._state.changed()
        if changed is not None:
            self._refuse(changed)
        written = self._written_constant()
        if written is not None:
            raise modified_input(written)
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
            self.prefetch_below = (len(self.expected) + 1) // 2
        start = mark(stream)
        values = self._save_again(args, kwargs)
        self.engine.timeline.add("recomputed_ms", start, mark(stream), self.engine.counters, self.layer.counters)
        super().unload()
        self.values = values
        return values

    def _save_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
        """Run forward up to the last tensor that autograd saves; returns these."""
        values: list[Tensor | None] = []
        expected, count = self.expected, len(self.expected)

        def collect(tensor: Tensor) -> Tensor:
            shape, dtype, parameter, version = expected[len(values)]
            base = tensor._base
            if base is None:
                base = tensor
            if type(base) is Parameter or parameter is not None:
                if base is not parameter:
                    self._refuse(f"a parameter of shape {list(tensor.shape)} has been replaced")
                if base._version != version:
                    self._refuse(f"a parameter of shape {list(tensor.shape)} has been modified by an inplace operation")
            return save(tensor, shape, dtype)

        def save(tensor: Tensor, shape: torch.Size | None, dtype: torch.dtype) -> Tensor:
            value = tensor.detach()
            if dtype != value.dtype or (shape is not None and shape != value.shape):
                self._fail(f"tensor {len(values)} was {dtype} {shape} and is {value.dtype} {value.shape} now")
            values.append(value)
            if len(values) == count:
                raise _EnoughRecomputedError
            return value

        def answer(first_slot: int, tensors: list[Tensor]) -> None:
            if first_slot != len(values):
                self._fail(f"{first_slot} tensors were saved and {len(values)} are at this point")
            for tensor in tensors:
                shape, dtype, *_ = expected[len(values)]
                save(tensor, shape, dtype)

        with (
            self._repeatable.context(),
            self._ambient.restored(),
            self._state.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(collect, _same),
            # Also without answers: a compiled part is traced anew where the modes are not those of forward.
            Replay(self._answers, answer, self._ambient.skip_to, self._fail)
            if self.engine.save == "attention"
            else contextlib.nullcontext(),
        ):
            try:
                self._repeatable.forward(*args, **kwargs)
            except _EnoughRecomputedError:
                return values
        if len(values) != count:  # else the layer has swallowed the exception
            self._fail(f"{count} tensors were saved and {len(values)} are now")
        return values

    def _refuse(self, changed: str) -> NoReturn:
        raise RecomputeError(
            f"layer {self.layer.name} has to be recomputed, but since its forward {changed}, so that gradients would be "
            "wrong; change parameters and buffers only when no backward is left to do, or use enable_ckpt=False"
        )

    def _fail(self, how: str) -> NoReturn:
        raise RecomputeError(
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
        with saved_tensors_hooks(call.packer(), restore), watch or contextlib.nullcontext():
            outputs = repeatable.forward(*args, **kwargs)
    except BaseException:
        call.leave_forward()
        raise
    call.end_forward(watch)
    if watch is None:
        return outputs
    layer.attention_count = watch.attention_count
    if not any(watch.answers):
        engine.note_fallback(layer, watch.refused or "calls no fused attention that is known")
    return outputs


def _same(tensor: Tensor) -> Tensor:
    return tensor
