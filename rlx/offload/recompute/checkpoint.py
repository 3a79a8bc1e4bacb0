"""`save="boundary"`: a layer keeps its inputs, off the device, and is recomputed when backward comes to it.

Written on saved-tensor hooks alone. In forward every tensor that autograd saves is replaced by a slot: nothing but its
place in the order. The first slot that backward asks for runs the layer's forward again, under hooks that
take its values in the same order and stop it after the last one: the operations behind it are not repeated. A value is
given away once; asked for again (a retained graph) the layer is recomputed again.

The idea of filling numbered holders by a second forward that stops early is that of torch's non-reentrant checkpoint
(torch/utils/checkpoint.py); this one differs in that layer inputs may leave the device, keyword tensors included, that a
write to a saved tensor is an error as in plain autograd, and that one without randomness repeats no random state.

Note [writes to saved tensors]
Each slot watches the version counter of the tensor it stands for, of whose memory nothing is left when forward has ended
(`rlx.offload.recompute.saved_slots`, Note [who may write to a saved tensor]). So a write after the save raises whether it is done inside the
layer, behind the operation with which recomputation stops, or outside on the layer's output. The layer's inputs are
watched too: a layer that writes to its own input cannot be run twice, and says so at the end of forward. An input written
to after the layer has ended is harmless if its bytes have left before.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from rlx.offload.autotune.profiler import ProfilingReplayMode
from rlx.offload.recompute.ambient_state import AmbientState, RandomState, accelerators_of
from rlx.offload.recompute.collector import Collector
from rlx.offload.recompute.errors import changed, not_the_same, other_mode, too_early
from rlx.offload.recompute.module_state import ModuleState, TensorSites
from rlx.offload.recompute.saved_slots import SavedSlots
from rlx.offload.recompute.stash import StashedTensor, modified_input, release_leaf_memory
from rlx.offload.replay.cached_op import CachedOp
from rlx.offload.replay.dataflow import fingerprints
from rlx.offload.replay.layer_policy import LayerPolicy
from rlx.offload.replay.recorder import Recorder
from rlx.offload.replay.replay_mode import DeadOpNeededError, ReplayMode
from rlx.offload.runtime.pytree import replace_leaves
from rlx.offload.runtime.session import Layer, LayerCall, OffloadSession
from rlx.offload.storage.regions import is_parameter, is_plain, size_bytes, span_length
from rlx.offload.storage.stats import mark

logger = logging.getLogger("rlx.offload")

_NO_ORDERS = LayerPolicy()
_VERSION, _IS_CPU = operator.attrgetter("_version"), operator.attrgetter("is_cpu")
# What is given for slots: the recomputed tensors, None where they have been asked for, and their versions.
Values = tuple[list[Any], list[int]]
_NOTHING: Values = ([], [])


class Repeatable(NamedTuple):
    """A layer as recomputation needs it.

    Args:
        module: the layer.
        forward: its forward, bound.
        places: where it keeps parameters and buffers.
        context: gives what is entered around a recomputation, None for nothing.
    """

    module: nn.Module
    forward: Callable[..., Any]
    places: TensorSites
    context: Callable[[], contextlib.AbstractContextManager[None] | None]


class RecomputedCall(LayerCall):
    """One forward call of a layer that backward will repeat.

    Args:
        engine: where the inputs go.
        layer: which place in the model this is.
        repeatable: what to repeat.
        args, kwargs: the call's arguments; tensors in nested tuples, lists, mappings and dataclasses are found.
        tensors: those of the arguments.
        orders: what the plan says of the layer; None: there is none.
    """

    def __init__(
        self,
        engine: OffloadSession,
        layer: Layer,
        repeatable: Repeatable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        orders: LayerPolicy | None = None,
    ) -> None:
        super().__init__(engine, layer)
        self._orders = orders or _NO_ORDERS
        self._is_watched = False
        self._repeatable = repeatable
        self._was_training = repeatable.module.training
        self._state = ModuleState(repeatable.places)
        self._slots = SavedSlots()
        self._values: Values = _NOTHING  # of each slot, once recomputed; None where it has been asked for
        self._ended: torch.Event | None = None  # a recomputation on several streams
        self._prefetch_below = 0  # backward fetches ahead when it comes to a slot before this one
        self._attention_slots: int | None = None
        self._lock = threading.Lock()
        self._constants: list[tuple[Tensor, int]] = []  # aliases of inputs that want no gradient, and their versions
        self._answers: dict[int, CachedOp | None] = {}
        self._call_count = 0
        accelerators = () if all(map(_IS_CPU, tensors)) else accelerators_of(tensors)
        self._device = accelerators[0] if accelerators else None
        self._began_on = torch.accelerator.current_stream(self._device) if accelerators else None
        self._inputs: list[StashedTensor] = []
        inputs: dict[
            int, StashedTensor | Tensor
        ] = {}  # the same object stays the same object: layers ask `query is key`
        for tensor in tensors:
            if id(tensor) not in inputs:
                inputs[id(tensor)] = self._store_input(tensor) if tensor.requires_grad else self._keep(tensor)
        # Whether the graph of a recomputation holds what `release_leaf_memory` does not empty: inputs that are leaves, or answered results.
        self._graph_holds = any(stored.is_given_as_leaf for stored in self._inputs)
        self._args, self._kwargs = replace_leaves(args, inputs), replace_leaves(kwargs, inputs)
        self._ambient = AmbientState(accelerators)

    def hooks(self) -> saved_tensors_hooks:
        """What forward runs under. Both hooks are called for every saved tensor, so they are written for speed."""

        watches, versions = self._slots.watches, self._slots.versions

        def unpack(index: int) -> Tensor:
            values, recomputed = self._values  # those of a recomputation on another thread are other lists
            tensor = values[index] if values else None
            if tensor is None:
                tensor, values, recomputed = self._value(index)
            values[index] = None
            # A backward may have written to memory that slots share, others to what was saved.
            watched = watches[index]()
            if tensor._version != recomputed[index] or (watched is not None and watched._version != versions[index]):
                raise self._slots.written(index)
            if index < self._prefetch_below:
                self._pass_middle(index)
            if self._ended is not None:
                self._hand_to_stream(tensor)
            return tensor

        return saved_tensors_hooks(self._slots.packer(), unpack)

    @property
    def slot_count(self) -> int:
        """How many tensors autograd has saved so far."""
        return len(self._slots.versions)

    def saved_since(self, slot: int) -> list[Tensor]:
        """The tensors of the slots from `slot` on, while forward runs."""
        return self._slots.saved[slot:]

    def random_state(self) -> RandomState:
        """The state of the random generators."""
        return self._ambient.random_state()

    def store(self, tensor: Tensor) -> StashedTensor | None:
        """Send a tensor off, or keep it if it is small; None where the host has no room for it."""
        offloaded = self.engine.offload(tensor, self) if self._may_leave(tensor) else None
        if offloaded is None:
            if size_bytes(tensor) >= max(self.engine.options.min_bytes, 1):
                return None
            self.layer.counters.kept_bytes += size_bytes(tensor)
        return StashedTensor(tensor, offloaded, is_result=True)

    def keep(self, tensor: Tensor) -> StashedTensor:
        """Keep a tensor on the device."""
        self.layer.counters.kept_bytes += size_bytes(tensor)
        return StashedTensor(tensor, None, is_result=True)

    def leave_forward(self) -> None:
        """Note that an exception has ended forward."""
        self._slots.leave_forward()
        self._ambient.leave_forward()

    def end_forward(self, watch: Recorder | None, outputs: Any) -> None:
        """Close forward.

        Raises:
            RuntimeError: if the layer wrote to one of its inputs, of which recomputation would see the new value, or drew
                random numbers that cannot be repeated.
        """
        try:
            if watch is not None:
                watch.end_forward(outputs)
                self._is_watched = self._graph_holds = True
                self._answers, self._call_count = watch.answers, watch.call_count
                self._attention_slots = watch.attention_slots
            self.layer.kinds = self._slots.end_forward(self.layer.kinds)
        finally:
            self._slots.leave_forward()
            self._ambient.end_forward()
        if self._orders.sample is not None:
            self._orders.sample.leave_forward()
        self._state.end_forward(self._slots.parameters.values())
        if self._written_constant() is not None or not all(stored.is_untouched for stored in self._inputs):
            raise RuntimeError(
                f"layer {self.layer.name} modifies one of its inputs by an inplace operation and can therefore not be "
                "recomputed; write out of place in the layer, or use enable_ckpt=False"
            )

    def evict(self, needed_by: LayerCall | None = None) -> None:
        """Let go of what is on the device for this call: also values that nobody asked for, of a branch without a loss."""
        self._values = _NOTHING
        super().evict(needed_by)

    def _value(self, index: int) -> tuple[Tensor, list[Any], list[int]]:
        """What is to be given for a slot whose value is not there, and those of all slots: recomputes the layer."""
        if not self._slots.watches:
            raise too_early(self.layer.name)
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

    def _pass_middle(self, index: int) -> None:
        """Backward is through with enough of the layer to fetch what the layer before has sent off, or to be looked at."""
        sample = self._orders.sample
        self._prefetch_below = 0 if sample is None else sample.pass_border(index)
        if sample is None or sample.is_late(index):
            self.prefetch(1)

    def _hand_to_stream(self, tensor: Tensor) -> None:
        """Make a recomputed tensor ready for the current stream (`rlx.offload.recompute.collector`, Note [layers on several streams])."""
        if self._ended is not None and not tensor.is_cpu:
            stream = torch.accelerator.current_stream(tensor.device)
            stream.wait_event(self._ended)
            if is_plain(tensor):
                tensor.record_stream(stream)

    def _keep(self, tensor: Tensor) -> Tensor:
        # Masks, rotary tables: shared by all layers as a rule, so that they stay alive anyway.
        self.layer.counters.kept_bytes += size_bytes(tensor)
        if tensor.is_inference():
            return tensor
        kept = tensor
        if type(tensor) is Tensor:
            # An alias: the tensor itself comes to hold the graph that holds this call if the layer's output is added to it.
            kept = tensor.detach()
            base = tensor._base
            self._slots.watch_by_base[id(tensor if base is None else base)] = kept
        self._constants.append((kept, tensor._version))
        return kept

    def _store_input(self, tensor: Tensor) -> StashedTensor:
        if is_parameter(tensor):
            stored = StashedTensor(tensor, None)
        else:
            leaves = self._orders.offload_boundary and self._may_leave(tensor)
            offloaded = self.engine.offload(tensor, self) if leaves else None
            if offloaded is None:
                self.layer.counters.kept_bytes += size_bytes(tensor)
            stored = StashedTensor(tensor, offloaded)
            if type(tensor) is Tensor and not tensor.is_inference():
                base = tensor._base
                self._slots.watch_by_base[id(tensor if base is None else base)] = stored.watch
        self._inputs.append(stored)
        return stored

    def _written_constant(self) -> Tensor | None:
        for tensor, version in self._constants:
            if tensor._version != version:
                return tensor
        return None

    def _may_leave(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or tensor.is_meta:
            return False
        if self._device is not None and tensor.is_cpu:
            return False
        return span_length(tensor) >= (self.engine.options.min_bytes or 1)

    def _recompute(self) -> list[Tensor]:
        if self._repeatable.module.training != self._was_training:
            raise other_mode(self.layer.name, self._was_training)
        if what := self._state.changed():
            raise changed(self.layer.name, what)
        written = self._written_constant()
        if written is not None:
            raise modified_input(written)
        sample = self._orders.sample
        if sample is not None:
            sample.begin_recompute()
        self.begin_backward()
        stream = torch.accelerator.current_stream(self._device) if self._device is not None else None
        tensors: dict[int, Tensor] = {}
        for stored in self._inputs:
            tensors[id(stored)] = stored.tensor()
        for kept, _ in self._constants:
            if kept.requires_grad:
                tensors[id(kept)] = kept.detach()
        args, kwargs = replace_leaves(self._args, tensors), replace_leaves(self._kwargs, tensors)
        layers = self.engine.options.prefetch_layers
        if layers is not None or self._orders.fetch_early:
            self.prefetch(1 if layers is None else layers)
        else:
            below = self._attention_slots if self._orders.fetch_below is None else self._orders.fetch_below
            middle = (len(self._slots.versions) + 1) // 2 if below is None else below
            self._prefetch_below = middle if sample is None else sample.begin_borders(middle)
        start = mark(stream)
        saved = self._save_what_is_read(args, kwargs)
        for tensor in tensors.values():
            release_leaf_memory(tensor)
        self.engine.timeline.add("recomputed_ms", start, mark(stream), self.engine.counters, self.layer.counters)
        if sample is not None:
            sample.end_recompute()
        super().evict()
        return saved

    def _save_what_is_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Run forward again without what nobody reads, where that is known to be right; find out, if nobody has."""
        orders, answers = self._orders, self._answers
        proof = orders.proof
        saved_places = orders.on_device | orders.off_device
        if proof is None or not all(answers.get(place) is not None for place in saved_places):
            return self._save_again(args, kwargs)
        if proof.is_given:
            with contextlib.suppress(DeadOpNeededError):
                return self._save_again(args, kwargs, leaves_out=True)
            return self._save_again(args, kwargs)
        if not proof.begin():
            return self._save_again(args, kwargs)
        poisoned: list[Tensor] | None = None
        try:
            poisoned = fingerprints(self._save_again(args, kwargs, leaves_out=True, poisons=True))
        except DeadOpNeededError:
            proof.give_up()
        except Exception:  # whatever a layer thinks of NaN: something reads it, and the layer runs whole from now on
            logger.info(
                "activation offloading: layer %s is recomputed whole, for it reads all results", self.layer.name
            )
        saved = self._save_again(args, kwargs)
        if poisoned is not None:
            proof.give(poisoned, fingerprints(saved))
        return saved

    def _save_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves_out: bool = False, poisons: bool = False
    ) -> list[Tensor]:
        """Run forward up to the last tensor that autograd saves; returns these, looked at, on a graph that saves nothing.

        `leaves_out`, `poisons` as of `ReplayMode`.
        """
        ends = self._is_watched or self._device is not None or self._slots.are_worth_ending_at()
        collector = Collector(self.layer, self._slots, self._began_on, ends, self._fail)
        saved = collector.saved
        around = self._repeatable.context(), self._ambient.restored(), self._state.restored()
        contexts: list[Any] = list(filter(None, around))
        if self._is_watched:
            # Also without answers: a compiled part is traced anew where the modes are not those of forward.
            how = self._answers, self._call_count, collector.answer, self._ambient.skip_to, self._fail
            sample = self._orders.sample
            is_measured = sample is not None and sample.sees_calls
            contexts.append(ProfilingReplayMode(sample, *how) if is_measured else ReplayMode(*how, leaves_out, poisons))
        try:
            if contexts:
                with contextlib.ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context)
                    collector.run(self._repeatable.forward, args, kwargs)
            else:
                collector.run(self._repeatable.forward, args, kwargs)
            # First, for where other tensors are saved parameters stand in other places. Also where the layer has swallowed
            # the exception.
            difference = self._slots.difference(saved)
            if difference is not None:
                self._fail(difference)
            if what := self._slots.changed_parameter(saved, collector.answered):
                raise changed(self.layer.name, what)
            self._ended = collector.end()
            if not self._graph_holds:
                return list(saved)
            # Without their graph, which holds results that were not computed again.
            return [tensor if type(tensor) is Parameter else tensor.detach() for tensor in saved]
        finally:
            saved.clear()  # Note [the work of hooks]

    def _fail(self, how: str) -> NoReturn:
        raise not_the_same(self.layer.name, how)
