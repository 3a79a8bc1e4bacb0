"""The profiling policy: it offloads a layer's inputs, recomputes the rest, and times each operation in both runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from rlx.offload.autotune.layer_profile import LayerProfile
from rlx.offload.autotune.op_profile import OpProfile
from rlx.offload.recompute.policy import LayerRecording, Run
from rlx.offload.recompute.stash import StashedTensor
from rlx.offload.replay.cached_op import sources_of, why_not_cacheable
from rlx.offload.replay.dataflow import CALL, DataflowRecorder, known_name
from rlx.offload.replay.instructions import LayerInstructions
from rlx.offload.replay.policy import CachedOpPolicy
from rlx.offload.replay.recorder import PlannedRecorder, attention_variant, call_name, versions_of
from rlx.offload.replay.replay_mode import ReplayMode
from rlx.offload.runtime.pytree import tensors_in
from rlx.offload.storage.regions import is_plain, size_bytes, storage_address
from rlx.offload.storage.stats import Mark


class ProfilingPolicy(CachedOpPolicy):
    """Measures one layer call. Only the layer's inputs are kept, as in boundary mode."""

    def __init__(self, profile: LayerProfile) -> None:
        super().__init__()
        # It reuses no result. But times count only if the layer is recomputed as with a plan, which reuses some.
        self.reuses_results = profile.sees_calls
        self._profile = profile

    def begin_forward(self, recording: LayerRecording) -> AbstractContextManager[object]:
        """Measure forward."""
        return ProfilingRecorder(recording, self._profile) if self._profile.sees_calls else self._timed_forward()

    @contextlib.contextmanager
    def _timed_forward(self) -> Iterator[None]:
        self._profile.begin_forward()
        yield
        self._profile.pass_forward()

    def end_forward(self, context: Any, outputs: Any) -> None:
        """Close the recorder."""
        if isinstance(context, ProfilingRecorder):
            super().end_forward(context, outputs)

    def release_forward(self) -> None:
        """See `LayerProfile.leave_forward`."""
        self._profile.leave_forward()

    def begin_recompute(self) -> None:
        """See `LayerProfile.begin_recompute`."""
        self._profile.begin_recompute()

    def recompute(self, run: Run) -> list[Tensor]:
        """Recompute the layer and measure its operations."""
        if not self._profile.sees_calls:
            return run()
        return run(partial(ProfilingReplayMode, self._profile, self._cached_ops, self._call_count))

    def end_recompute(self) -> None:
        """See `LayerProfile.end_recompute`."""
        self._profile.end_recompute()

    def first_threshold(self, prefetch_below: int) -> int:
        """See `LayerProfile.begin_thresholds`."""
        return self._profile.begin_thresholds(prefetch_below)

    def pass_threshold(self, slot: int) -> int:
        """See `LayerProfile.pass_threshold`."""
        return self._profile.pass_threshold(slot)


class ProfilingRecorder(PlannedRecorder):
    """Times each operation in forward, and notes which bytes its cached op would hold and which operations read its result."""

    def __init__(self, recording: LayerRecording, profile: LayerProfile) -> None:
        super().__init__(recording, LayerInstructions())
        self.sees_all = True
        self._dataflow = DataflowRecorder({*profile.inputs.memory, *profile.inputs.shared})
        self._profile = profile
        self._seen: set[tuple[int, int]] = set()
        self._unstashed: list[OpProfile] = []  # others whose results may be offloaded when the next call begins

    def __enter__(self) -> Any:
        self._profile.begin_forward()
        return super().__enter__()

    def end_forward(self, outputs: Any) -> None:
        """End the forward: note which results can be cached, and cache none of them."""
        super().end_forward(outputs)
        self._note_stashed()
        saved = self._recording.saved_since(0)
        is_cacheable = [self.cached_ops[op] is not None for op in range(len(self._profile.calls))]
        self._profile.end_forward(saved, is_cacheable, self._dataflow.dataflow(saved))
        self.cached_ops = {}

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        variant = attention_variant(args, kwargs) if is_attention else ""
        call = OpProfile(call_name(function, args, is_attention), variant, self._profile.mark())
        self._note_stashed()
        op = len(self._profile.calls)
        self._profile.calls.append(call)
        try:
            result = super()._run(function, args, kwargs, is_attention)
        finally:
            call.stop = self._profile.mark()
            call.slots = self._recording.slot_count
        call.summed_bytes = 0 if is_attention else _summed_bytes(tensors_in((args, kwargs)))
        may_be_dead = self.cached_ops[op] is not None and not is_attention
        self._dataflow.note(op, CALL, tensors_in((args, kwargs)), tensors_in(result), may_be_dead)
        return result

    def run_other(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See `OpMode.run_other`."""
        arguments, name = tensors_in((args, kwargs)), known_name(function, kwargs)
        versions = versions_of(arguments)
        if name is None:
            result = function(*args, **kwargs)
            self._dataflow.note_unknown(function, arguments, versions != versions_of(arguments), tensors_in(result))
            return result
        profile, first_slot = self._profile, self._recording.slot_count
        call = OpProfile(name, "", profile.mark())
        profile.others.append(call)
        result = function(*args, **kwargs)
        call.stop = profile.mark()
        seen, results = self._recording.saved_since(first_slot), tensors_in(result)
        may_be_dead = why_not_cacheable((*arguments, *results)) is None and all(map(is_plain, seen))
        may_be_dead = may_be_dead and sources_of(seen, arguments) is not None
        # The graph decides when a result is stashed (Note [when a result is stashed]).
        call.is_cacheable = may_be_dead and all(tensor.grad_fn is not None for tensor in results)
        for tensor in results:
            call.nbytes += size_bytes(tensor)
            call.small_bytes += size_bytes(tensor) if size_bytes(tensor) < profile.min_bytes else 0
            call.storages[storage_address(tensor)] = size_bytes(tensor)
        self._unstashed.append(call)
        self._dataflow.note(-len(profile.others), name, arguments, results, may_be_dead)
        return result

    def _note_stashed(self) -> None:
        if self._unstashed:
            now = self._profile.mark()
            for call in self._unstashed:
                call.stored = now
            self._unstashed.clear()

    def _is_wanted(self, op: int, function: Any, args: Any, is_attention: bool) -> bool:
        return True

    def _stash(self, op: int, tensor: Tensor) -> StashedTensor:
        storage, call, nbytes = tensor.untyped_storage(), self._profile.calls[op], size_bytes(tensor)
        address = (op, storage.data_ptr())
        if address not in self._seen:  # attention saves its own result as well
            self._seen.add(address)
            call.nbytes += nbytes
            call.small_bytes += nbytes if nbytes < self._profile.min_bytes else 0
            call.storages[storage.data_ptr()] = storage.nbytes()
            call.stored = self._profile.mark()
        return StashedTensor(tensor, None)


def _summed_bytes(arguments: list[Tensor]) -> int:
    """Return the bytes of a linear map's input if its bias requires a gradient, else 0.

    Without recomputation autograd frees this input only after it has summed the bias's gradient; with it, before.
    """
    if not any(tensor.requires_grad and tensor.dim() == 1 for tensor in arguments):
        return 0
    return max((size_bytes(tensor) for tensor in arguments if tensor.dim() > 1 and not tensor.is_leaf), default=0)


class ProfilingReplayMode(ReplayMode):
    """Times each operation of a layer as it runs again; further arguments are those of `ReplayMode`."""

    def __init__(self, profile: LayerProfile, *args: Any) -> None:
        super().__init__(*args)
        self._profile = profile
        self._call_profiles, self._other_profiles = iter(profile.calls), iter(profile.others)
        self.sees_all = True

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        start = self._profile.mark()
        result = super()._run(function, args, kwargs, is_attention)
        self._note(start, self._call_profiles)
        return result

    def run_other(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See `OpMode.run_other`."""
        start = self._profile.mark()
        result = super().run_other(function, args, kwargs)
        if known_name(function, kwargs) is not None:
            self._note(start, self._other_profiles)
        return result

    def _note(self, start: Mark, profiles: Iterator[OpProfile]) -> None:
        call = next(profiles, None)
        if call is not None and call.recomputed is None:
            call.recomputed = start, self._profile.mark()
