"""Policies that keep the results of some operations, so that recomputation does not repeat these."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from rlx.offload.recompute.checkpoint import RecomputedCall, RecomputePolicy, Run
from rlx.offload.replay.cached_op import CachedOp
from rlx.offload.replay.recorder import AttentionRecorder, LayerInstructions, PlannedRecorder, Recorder
from rlx.offload.replay.replay_mode import ReplayMode


class CachedOpPolicy(RecomputePolicy):
    """Cache the results of operations in forward and replay them in recomputation; subclasses choose the recorder."""

    reuses_results = True

    def __init__(self) -> None:
        self._cached_ops: dict[int, CachedOp | None] = {}
        self._call_count = 0
        self._attention_slots: int | None = None

    @property
    def has_cached_ops(self) -> bool:
        return any(self._cached_ops.values())

    def end_forward(self, context: Recorder, outputs: Any) -> None:
        context.end_forward(outputs)
        self._cached_ops, self._call_count = context.cached_ops, context.call_count
        self._attention_slots = context.attention_slots

    def recompute(self, run: Run) -> list[Tensor]:
        # In a mode also if nothing was cached: if the modes differ from forward's, torch traces compiled parts again.
        return run(partial(ReplayMode, self._cached_ops, self._call_count))

    def prefetch_below(self, slots: int) -> int:
        """Prefetch when backward has passed the operations after attention: the memory of the MLP is free then."""
        return super().prefetch_below(slots) if self._attention_slots is None else self._attention_slots


class AttentionPolicy(CachedOpPolicy):
    """`save="attention"`; for `expected` see `AttentionRecorder`."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self.attention_count = expected
        self.refusal: str | None = None  # why attention was not cached

    def begin_forward(self, recording: RecomputedCall) -> AttentionRecorder:
        return AttentionRecorder(recording, self.attention_count)

    def end_forward(self, context: Recorder, outputs: Any) -> None:
        super().end_forward(context, outputs)
        self.attention_count, self.refusal = context.attention_count, context.refusal


class PlannedPolicy(CachedOpPolicy):
    """A plan's decisions for one layer."""

    def __init__(self, instructions: LayerInstructions) -> None:
        super().__init__()
        self.is_off_plan = False  # the layer makes other calls than when it was profiled
        self.offloads_inputs = instructions.offload_boundary
        self.prefetches_early = instructions.prefetch_early
        self.reuses_results = bool(instructions.cached_ops)
        self._instructions = instructions

    def begin_forward(self, recording: RecomputedCall) -> PlannedRecorder | None:
        return PlannedRecorder(recording, self._instructions) if self.reuses_results else None

    def end_forward(self, context: Recorder | None, outputs: Any) -> None:
        if isinstance(context, PlannedRecorder):
            super().end_forward(context, outputs)
            self.is_off_plan = context.is_off_plan

    def recompute(self, run: Run) -> list[Tensor]:
        return super().recompute(run) if self.reuses_results else run()

    def prefetch_below(self, slots: int) -> int:
        below = self._instructions.prefetch_below
        return super().prefetch_below(slots) if below is None else below
