"""Boundary mode: a layer keeps its inputs, offloaded, and is recomputed when backward reaches it.

1. Forward runs under saved-tensor hooks. Autograd gets a slot, a number, for each tensor that it saves: 0 for the first.
   The layer's inputs are offloaded; those that are small or need no gradient stay on the device. Nothing else is kept.
2. Backward asks for a slot. The first request fetches the inputs and runs the layer's forward again. The n-th tensor that
   autograd saves now is the value of slot n.
3. The recomputation stops after the last slot: autograd saves `h` for a last linear map `down(h)`, whose product is not repeated.
4. Each value is given away once. If backward asks for a slot again (`retain_graph=True`), the layer is recomputed again.
5. The recomputation must save what forward saved, in number, shape and dtype, of the same parameters; else `RecomputeError`.

A `RecomputePolicy` may keep results, so that recomputation skips their operations, or profile the layer.

Note [writes to saved tensors]
A write to a saved tensor before backward reads it is an error, as in plain autograd: a slot compares version counters (Note [who
may write to a saved tensor] in `saved_slots.py`). A layer that writes to its own input cannot run twice, so it raises at the end
of its forward. A write to an input after the layer has ended is harmless once the bytes have been offloaded.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from rlx.offload.recompute.ambient_state import AmbientState, RandomState, accelerators_of
from rlx.offload.recompute.module_state import ModuleState, TensorSites
from rlx.offload.recompute.saved_inputs import LayerInputs, StashedTensor, modified_input, release_leaf_memory
from rlx.offload.recompute.saved_slots import (
    Collector,
    RecomputedLayer,
    RecomputeError,
    SavedSlots,
    changed,
    not_the_same,
)
from rlx.offload.runtime.forward_override import run_with
from rlx.offload.runtime.layers import CheckpointingFlags, is_checkpointed
from rlx.offload.runtime.session import LayerCall, OffloadSession
from rlx.offload.storage.offloader import OffloadedRange, mark
from rlx.offload.storage.tensor_bytes import is_plain, present, size_bytes

Around = Callable[[Collector], AbstractContextManager[object]]  # makes a context to recompute in
Run = Callable[..., list[Tensor]]  # runs forward again, in an `Around` if given; returns the saved tensors


class RecomputePolicy:
    """A layer call's policy. This base class is boundary mode: offload the inputs, recompute everything else.

    A policy belongs to one layer call, and the graph keeps both alive. It must hold no reference to the call.
    """

    offloads_inputs = True  # else they are kept on the device
    prefetches_early = False  # prefetch the layer before this one when recomputation begins, not below a slot
    # A recomputation may use results of forward. Its graph would hold them, so the saved tensors are detached from it.
    reuses_results = False

    def begin_forward(self, recording: RecomputedCall) -> AbstractContextManager[object] | None:
        return None

    def end_forward(self, context: Any, outputs: Any) -> None:
        """Close the context that `begin_forward` returned, while the saved tensors of forward are still alive."""

    def release_forward(self) -> None:
        """Follow the release of forward's saved tensors."""

    def begin_recompute(self) -> None: ...
    def recompute(self, run: Run) -> list[Tensor]:
        return run()

    def end_recompute(self) -> None: ...

    def prefetch_below(self, slots: int) -> int:
        """Return the slot of `slots` below which backward prefetches the layer before this one. Example: of 20, at slot 9."""
        return (slots + 1) // 2

    def first_threshold(self, prefetch_below: int) -> int:
        return prefetch_below

    def pass_threshold(self, slot: int) -> int:
        """Backward asks for `slot`, which lies below the threshold. Return the next threshold; 0: there is none."""
        return 0


BOUNDARY = RecomputePolicy()


_VERSION, _IS_CPU = operator.attrgetter("_version"), operator.attrgetter("is_cpu")
# Values of the slots: recomputed tensors, None for one that backward has taken, and the tensors' versions.
Values = tuple[list[Any], list[int]]
_NOTHING: Values = ([], [])


class Repeatable(NamedTuple):
    """A layer's forward that can be run a second time."""

    module: nn.Module
    forward: Callable[..., Any]  # bound
    others: Sequence[Any] = ()  # what its arguments hold besides tensors and numbers


class RecomputedCall(LayerCall):
    """One forward call of a layer that backward will repeat."""

    layer: RecomputedLayer

    def __init__(
        self,
        session: OffloadSession,
        layer: RecomputedLayer,
        repeatable: Repeatable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        policy: RecomputePolicy,
    ) -> None:
        super().__init__(session, layer)
        self._policy = policy
        self._repeatable = repeatable._replace(others=()) if repeatable.others else repeatable
        self._was_training = repeatable.module.training
        if layer.sites is None:
            layer.sites = TensorSites(repeatable.module)
        self._state = ModuleState(layer.sites, repeatable.others)
        self._slots = SavedSlots()
        self._values: Values = _NOTHING
        self._ended: torch.Event | None = None  # of a recomputation on several streams
        self._prefetch_below = self._threshold = 0  # slots; see RecomputePolicy
        self._lock = threading.Lock()
        accelerators = () if all(map(_IS_CPU, tensors)) else accelerators_of(tensors)
        self._device = accelerators[0] if accelerators else None
        self._began_on = torch.accelerator.current_stream(self._device) if accelerators else None
        alias = self._slots.alias_by_base
        self._inputs = LayerInputs(args, kwargs, tensors, self._offload_input, layer.counters, alias)
        self._ambient = AmbientState(accelerators)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward; RuntimeError if the layer wrote to one of its inputs, or drew random numbers that cannot be repeated."""
        forward, context = self._repeatable.forward, None
        try:
            self._ambient.begin_forward()
            with self._hooks():
                context = self._policy.begin_forward(self)
                if context is None:
                    outputs = forward(*args, **kwargs)
                else:
                    with context:
                        outputs = forward(*args, **kwargs)
            self._end_forward(context, outputs)
        except BaseException:
            self._slots.release_forward()
            self._ambient.leave_forward()
            self._state.leave_forward()
            del self._inputs  # an argument may hold a graph, which holds this call
            raise
        return outputs

    def _hooks(self) -> saved_tensors_hooks:
        """Return the hooks of forward. Both are called for every saved tensor, so they are written for speed."""
        aliases, versions = self._slots.aliases, self._slots.versions

        def unpack(index: int) -> Tensor:
            values, recomputed = self._values  # those of a recomputation on another thread are other lists
            tensor = values[index] if values else None
            if tensor is None:
                tensor, values, recomputed = self._value(index)
            values[index] = None
            # A backward may write to memory that slots share, the user's code to the tensor that was saved.
            alias = aliases[index]()
            if tensor._version != recomputed[index] or (alias is not None and alias._version != versions[index]):
                raise self._slots.written(index)
            if index < self._threshold:
                self._pass_threshold(index)
            if self._ended is not None:
                _hand_to_stream(tensor, self._ended)
            return present(tensor) if type(tensor) is Parameter else tensor

        return saved_tensors_hooks(self._slots.packer(), unpack)

    # The call as a policy sees it in forward.

    @property
    def slot_count(self) -> int:
        return len(self._slots.versions)

    def saved_since(self, slot: int) -> list[Tensor]:
        return self._slots.saved[slot:]

    def random_state(self) -> RandomState:
        return self._ambient.random_state()

    def stash(self, tensor: Tensor) -> StashedTensor | None:
        """Offload a result, or keep it on the device if it is small; None if the host has no room."""
        offloaded = self._offload(tensor)
        if offloaded is None:
            if size_bytes(tensor) >= self.session.min_bytes:
                return None
            self.layer.counters.kept_bytes += size_bytes(tensor)
        return StashedTensor(tensor, offloaded, is_result=True)

    def keep(self, tensor: Tensor) -> StashedTensor:
        self.layer.counters.kept_bytes += size_bytes(tensor)
        return StashedTensor(tensor, None, is_result=True)

    def _end_forward(self, context: contextlib.AbstractContextManager[object] | None, outputs: Any) -> None:
        try:
            self._policy.end_forward(context, outputs)
            self.layer.specs = self._slots.end_forward(self.layer.specs)
        finally:
            self._slots.release_forward()
            self._ambient.end_forward()
        self._policy.release_forward()
        self._state.end_forward(self._slots.parameters.values())
        if not self._inputs.is_untouched:
            raise RuntimeError(
                f"layer {self.layer.name} modifies one of its inputs by an inplace operation and can therefore not be "
                "recomputed; use an out-of-place operation, or enable_ckpt=False"
            )

    def evict(self, needed_by: LayerCall | None = None) -> None:
        """Release the device memory of this call, also of values that backward never asked for (a branch without a loss)."""
        self._values = _NOTHING
        super().evict(needed_by)

    def _value(self, index: int) -> tuple[Tensor, list[Any], list[int]]:
        """Return the value of a slot, and the values of all slots with their versions; recompute the layer if needed."""
        if not self._slots.aliases:
            raise RecomputeError(
                f"layer {self.layer.name} runs a backward pass inside its own forward, which cannot be recomputed before it "
                "has ended; use enable_ckpt=False, or leave the layer out of layers="
            )
        if self._slots.is_written(index):
            raise self._slots.written(index)
        with self._lock:
            values, recomputed = self._values
            tensor = values[index] if values else None
            if tensor is None:
                with torch.enable_grad():
                    saved = self._recompute()
                self._values = values, recomputed = saved, list(map(_VERSION, saved))
                tensor = saved[index]
            return tensor, values, recomputed

    def _pass_threshold(self, index: int) -> None:
        self._threshold = self._policy.pass_threshold(index)
        if index < self._prefetch_below:
            self.prefetch()

    def _offload_input(self, tensor: Tensor) -> OffloadedRange | None:
        offloaded = self._offload(tensor) if self._policy.offloads_inputs else None
        if offloaded is None:
            self.layer.counters.kept_bytes += size_bytes(tensor)
        return offloaded

    def _offload(self, tensor: Tensor) -> OffloadedRange | None:
        if not is_plain(tensor) or tensor.is_meta or (self._device is not None and tensor.is_cpu):
            return None
        return self.session.offload(tensor, self)

    def _recompute(self) -> list[Tensor]:
        policy = self._policy
        self._check_unchanged()
        policy.begin_recompute()
        self.begin_backward()
        stream = torch.accelerator.current_stream(self._device) if self._device is not None else None
        args, kwargs, inputs = self._inputs.restored()
        if self.session.options.prefetch_layers is not None or policy.prefetches_early:
            self.prefetch()
        else:
            self._prefetch_below = policy.prefetch_below(len(self._slots.versions))
            self._threshold = policy.first_threshold(self._prefetch_below)
        start = mark(stream)
        saved = policy.recompute(partial(self._run_again, args, kwargs))
        for tensor in inputs:
            release_leaf_memory(tensor)
        self.session.timeline.add("recomputed_ms", start, mark(stream), self.session.counters, self.layer.counters)
        policy.end_recompute()
        super().evict()
        return saved

    def _check_unchanged(self) -> None:
        if self._repeatable.module.training != self._was_training:
            raise RecomputeError(
                f"layer {self.layer.name} was in {'training' if self._was_training else 'evaluation'} mode in forward "
                "and is not in backward, which has to recompute it; switch modes only between steps"
            )
        if change := self._state.changed():
            raise changed(self.layer.name, change)
        if (written := self._inputs.written_constant()) is not None:
            raise modified_input(written)

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around | None = None) -> list[Tensor]:
        """Run forward up to the last tensor that autograd saves; return the saved tensors (`Run` of a policy)."""
        assert self.layer.sites is not None
        may_stop = not self.layer.sites.is_scripted  # TorchScript turns any exception into its own
        collector = Collector(self.layer, self._slots, self._began_on, may_stop, self._ambient)
        saved = collector.saved
        module = self._repeatable.module
        run = partial(collector.run, self._repeatable.forward, args, kwargs)
        is_checkpointed_now = self.session.is_disabled or is_checkpointed(module)
        if replaced := self._state.replaced():
            run = partial(run_with, module, replaced, run)
        try:
            with contextlib.ExitStack() as stack:
                if (ambient := self._ambient.restored()) is not None:
                    stack.enter_context(ambient)
                stack.enter_context(self._state.restored())
                if is_checkpointed_now:  # transformers' own must not run inside
                    flags = CheckpointingFlags(module.modules())
                    stack.callback(flags.restore)
                    flags.switch_off()
                if around is not None:
                    stack.enter_context(around(collector))
                run()
            self._slots.accept_writes(self._state.rewritten)
            # Also if the layer swallowed the exception that stopped it. If the number of tensors differs, parameters are elsewhere.
            if (difference := self._slots.difference(saved)) is not None:
                raise not_the_same(self.layer.name, difference)
            if change := self._slots.changed_parameter(saved, collector.filled):
                raise changed(self.layer.name, change)
            self._ended = collector.end()
            if not self._policy.reuses_results and not self._inputs.has_grad_leaves:
                return list(saved)
            # Detached from their graph, which holds inputs and results that `release_leaf_memory` does not empty.
            return [tensor if type(tensor) is Parameter else tensor.detach() for tensor in saved]
        finally:
            saved.clear()  # Note [the work of hooks] in saved_slots.py


def _hand_to_stream(tensor: Tensor, recomputed: torch.Event) -> None:
    """Make a tensor ready for the current stream (Note [layers on several streams] in `saved_slots.py`)."""
    if not tensor.is_cpu:
        stream = torch.accelerator.current_stream(tensor.device)
        stream.wait_event(recomputed)
        if is_plain(tensor):
            tensor.record_stream(stream)
