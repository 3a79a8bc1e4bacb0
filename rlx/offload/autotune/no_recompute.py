"""Layers that a plan does not recompute: they run unchanged, and their backward prefetches the layer before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlx.offload.replay.instructions import LayerInstructions
from rlx.offload.replay.replay_mode import OpMode
from rlx.offload.runtime.pytree import tensors_in
from rlx.offload.runtime.session import Layer, LayerCall, OffloadSession
from rlx.offload.streaming.weights import weights_are_refetched


class NoRecomputeCall(LayerCall):
    """One forward call of a layer that keeps all the tensors that autograd saves."""

    def __init__(self, session: OffloadSession, layer: Layer, instructions: LayerInstructions) -> None:
        super().__init__(session, layer)
        layer.counters.kept_bytes += instructions.saved_bytes
        self.prefetches_early = session.options.prefetch_layers is not None or instructions.prefetch_early

    def enter(self, gradient: Tensor) -> None:
        """Hook of the layer's outputs: the layer's backward begins."""
        self.begin_backward()
        if self.prefetches_early:
            self.prefetch()

    def pass_op(self, gradient: Tensor) -> None:
        """Hook of an operation's results: backward has passed all operations after it."""
        self.begin_backward()
        self.prefetch()


class _LateHook(OpMode):
    """Hooks the results of call `op`, so that backward prefetches there; None: of the linear map after each attention."""

    def __init__(self, call: NoRecomputeCall, op: int | None) -> None:
        super().__init__()
        self._call = call
        self._op = op
        self._count = 0
        self._wants_next = False

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        result = function(*args, **kwargs)
        if self._wants_next if self._op is None else self._op == self._count:
            _hook(result, self._call.pass_op)
        self._wants_next = is_attention
        self._count += 1
        return result


def run_without_recompute(
    session: OffloadSession,
    layer: Layer,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    instructions: LayerInstructions,
) -> Any:
    """Run a layer's forward unchanged; return its outputs."""
    call = NoRecomputeCall(session, layer, instructions)
    before = call.previous()
    if call.prefetches_early or before is None or not before.offloaded:
        with weights_are_refetched():
            outputs = forward(*args, **kwargs)
    else:
        with weights_are_refetched(), _LateHook(call, instructions.prefetch_call):
            outputs = forward(*args, **kwargs)
    _hook(outputs, call.enter)
    return outputs


def _hook(value: Any, hook: Callable[[Tensor], None]) -> None:
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
