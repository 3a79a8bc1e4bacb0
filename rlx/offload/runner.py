"""How a layer's forward runs where layers are recomputed: kept whole, recomputed, or with calls that are not repeated."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from rlx.offload.autotune.no_recompute import run_without_recompute
from rlx.offload.autotune.profiler import ProfilingRecorder
from rlx.offload.recompute.checkpoint import RecomputedCall, Repeatable
from rlx.offload.replay.recorder import AttentionRecorder, PlannedRecorder, Recorder
from rlx.offload.runtime.session import Layer, OffloadSession

_WANTS_GRADIENT = operator.attrgetter("requires_grad")


def run_recomputed(
    engine: OffloadSession,
    layer: Layer,
    repeatable: Repeatable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
) -> Any:
    """Run a layer's forward so that only its inputs and the answers that `save` asks for are kept, or all by a plan.

    `tensors` are those among the arguments.
    """
    if not any(map(_WANTS_GRADIENT, tensors)) and not any(map(_WANTS_GRADIENT, repeatable.module.parameters())):
        return repeatable.forward(*args, **kwargs)
    orders = engine.orders(layer, repeatable.module, tensors) if engine.orders is not None else None
    if orders is not None and orders.keep:
        return run_without_recompute(engine, layer, repeatable.forward, args, kwargs, orders)
    call = RecomputedCall(engine, layer, repeatable, args, kwargs, tensors, orders)
    watch: Recorder | None = None
    sample = None if orders is None else orders.sample
    if engine.save == "attention":
        watch = AttentionRecorder(call, layer.attention_count)
    elif sample is not None:
        watch = ProfilingRecorder(call, sample) if sample.sees_calls else None
    elif orders is not None and orders.has_calls:
        watch = PlannedRecorder(call, orders)
    try:
        with call.hooks():
            if watch is not None:
                with watch:
                    outputs = repeatable.forward(*args, **kwargs)
            elif sample is not None:
                sample.begin_forward()
                outputs = repeatable.forward(*args, **kwargs)
                sample.pass_forward()
            else:
                outputs = repeatable.forward(*args, **kwargs)
    except BaseException:
        call.leave_forward()
        raise
    call.end_forward(watch, outputs)
    if isinstance(watch, AttentionRecorder):
        layer.attention_count = watch.attention_count
        if not any(watch.answers.values()):
            engine.note_fallback(layer, watch.refused or "calls no fused attention that is known")
    elif isinstance(watch, PlannedRecorder) and watch.is_off_plan:
        engine.note_off_plan(layer)
    return outputs
