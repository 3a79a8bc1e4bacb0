"""The choice of a policy for each layer call, in every mode that recomputes layers."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from rlx.offload.autotune.layer_profile import LayerProfile
from rlx.offload.autotune.no_recompute import run_without_recompute
from rlx.offload.autotune.profiler import ProfilingPolicy
from rlx.offload.recompute.checkpoint import RecomputedCall, Repeatable
from rlx.offload.recompute.layer import RecomputedLayer
from rlx.offload.recompute.policy import BOUNDARY, RecomputePolicy
from rlx.offload.replay.instructions import LayerInstructions
from rlx.offload.replay.policy import AttentionPolicy, PlannedPolicy
from rlx.offload.runtime.session import Layer, OffloadSession

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
                    f"activation offloading: save='attention' has no effect in layer {layer.name}, which "
                    f"{policy.refusal or 'calls no fused attention that is known'}: only its inputs are kept, and attention "
                    "is recomputed. Use attn_implementation='sdpa', or register_attention. Said once",
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
