"""Layers that a plan keeps whole: they run as they are. Backward that comes to one fetches what the layer before has sent off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlx.offload.replay.layer_policy import LayerPolicy
from rlx.offload.replay.replay_mode import OpMode
from rlx.offload.runtime.pytree import tensors_in
from rlx.offload.runtime.session import Layer, LayerCall, OffloadSession


class NoRecomputeCall(LayerCall):
    """One forward call of a layer that keeps all that autograd saves."""

    def __init__(self, engine: OffloadSession, layer: Layer, orders: LayerPolicy) -> None:
        super().__init__(engine, layer)
        layer.counters.kept_bytes += orders.saved_bytes
        layers = engine.options.prefetch_layers
        self.prefetch_layers = 1 if layers is None else layers
        self.fetches_early = layers is not None or orders.fetch_early

    def enter(self, gradient: Tensor) -> None:
        """Hook of the layer's outputs: backward begins."""
        self.begin_backward()
        if self.fetches_early:
            self.prefetch(self.prefetch_layers)

    def pass_call(self, gradient: Tensor) -> None:
        """Hook of a call's results: backward comes to it, and is through with the rest."""
        self.begin_backward()
        self.prefetch(self.prefetch_layers)


class _LateHook(OpMode):
    """Hooks the results of a call, or of the linear maps behind attention.

    Args:
        call: which layer call fetches then.
        place: of the call whose results are hooked; None: whatever follows attention.
    """

    def __init__(self, call: NoRecomputeCall, place: int | None) -> None:
        super().__init__()
        self._call = call
        self._place = place
        self._count = 0
        self._wants_next = False

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        result = function(*args, **kwargs)
        if self._wants_next if self._place is None else self._place == self._count:
            _hook(result, self._call.pass_call)
        self._wants_next = is_attention
        self._count += 1
        return result


def run_without_recompute(
    engine: OffloadSession, layer: Layer, forward: Callable[..., Any], args: Any, kwargs: Any, orders: LayerPolicy
) -> Any:
    """Run a layer's forward as it is."""
    call = NoRecomputeCall(engine, layer, orders)
    before = call.previous() if call.previous is not None else None
    if call.fetches_early or before is None or not before.offloaded:
        outputs = forward(*args, **kwargs)
    else:
        with _LateHook(call, orders.fetch_call):
            outputs = forward(*args, **kwargs)
    _hook(outputs, call.enter)
    return outputs


def _hook(value: Any, hook: Callable[[Tensor], None]) -> None:
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
