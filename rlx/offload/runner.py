"""The choice of a policy for each layer call, in every mode that recomputes layers."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from rlx.offload.autotune.measure import LayerProfile, ProfilingPolicy
from rlx.offload.recompute.checkpoint import RecomputedCall, Repeatable
from rlx.offload.recompute.collector import RecomputedLayer
from rlx.offload.recompute.policy import BOUNDARY, RecomputePolicy
from rlx.offload.replay.instructions import LayerInstructions
from rlx.offload.replay.policy import AttentionPolicy, PlannedPolicy
from rlx.offload.replay.replay_mode import OpMode
from rlx.offload.runtime.pytree import tensors_in
from rlx.offload.runtime.session import Layer, LayerCall, OffloadSession
from rlx.offload.streaming.weights import weights_are_refetched

logger = logging.getLogger("rlx.offload")

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
# Decides for a layer call: a plan's instructions, a profile that measures it, or None for boundary mode.
Decide = Callable[[Layer, nn.Module, Sequence[Tensor]], LayerInstructions | LayerProfile | None]


class LayerRunner:
    """Runs the layers of one model.

    Args:
        session: of the model.
        decide: of the controller, with `save="auto"`; None with any other `save`.
    """

    def __init__(self, session: OffloadSession, decide: Decide | None) -> None:
        self._session = session
        self.decide = decide
        self._attention_counts: dict[int, int] = {}  # by layer: attention calls of its latest forward

    def run(
        self,
        layer: RecomputedLayer,
        repeatable: Repeatable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Run a layer's forward under the policy of this call; return its outputs. Arguments as for `RecomputedCall`."""
        if not any(map(_REQUIRES_GRAD, tensors)) and not any(map(_REQUIRES_GRAD, repeatable.module.parameters())):
            return repeatable.forward(*args, **kwargs)
        policy = self._policy(layer, repeatable.module, tensors)
        if isinstance(policy, LayerInstructions):
            return run_without_recompute(self._session, layer, repeatable.forward, args, kwargs, policy)
        outputs = RecomputedCall(self._session, layer, repeatable, args, kwargs, tensors, policy).run(args, kwargs)
        if policy is BOUNDARY:
            return outputs
        if isinstance(policy, AttentionPolicy):
            self._attention_counts[layer.index] = policy.attention_count
            if not policy.has_cached_ops and self._session.is_first("save=attention has no effect"):
                logger.warning(
                    f"activation offloading: save='attention' has no effect in layer {layer.name!r}, which "
                    f"{policy.refusal or 'calls no fused attention that is known'}: it runs as with save='boundary'. "
                    f"{_attention_advice(repeatable.module)}. Said once",
                )
        elif isinstance(policy, PlannedPolicy) and policy.is_off_plan and self._session.is_first("off plan"):
            logger.info(
                f"activation offloading: layer {layer.name} calls other attention or linear maps than when it was measured: "
                "from there on it is recomputed. Said once",
            )
        return outputs

    def _policy(
        self, layer: RecomputedLayer, module: nn.Module, tensors: list[Tensor]
    ) -> RecomputePolicy | LayerInstructions:
        """Return the policy of a layer call; for a layer that is not recomputed the plan's instructions."""
        if self._session.save == "attention":
            return AttentionPolicy(self._attention_counts.get(layer.index, 0))
        decided = None if self.decide is None else self.decide(layer, module, tensors)
        if decided is None:
            return BOUNDARY
        if isinstance(decided, LayerProfile):
            return ProfilingPolicy(decided)
        return decided if decided.keep else PlannedPolicy(decided)


def _attention_advice(layer: nn.Module) -> str:
    """Return what makes attention of a layer known: an argument of transformers only for its models."""
    configs = (getattr(module, "config", None) for module in layer.modules())
    if any(hasattr(config, "_attn_implementation") for config in configs):
        return "Use attn_implementation='sdpa', or register_attention"
    return "If it has attention, call torch's scaled_dot_product_attention in it, or register_attention"


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
