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
from rlx.offload.recompute.checkpoint import Repeatable, run_recomputed
from rlx.offload.recompute.layer import RecomputedLayer
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
        self.decide = decide
        self._session = session
        self._attention_counts: dict[int, int] = {}  # by layer: attention calls of its latest forward
        self._has_noted_fallback = False

    def run(
        self,
        layer: RecomputedLayer,
        repeatable: Repeatable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Run a layer's forward under the policy of this call; return its outputs.

        Args:
            layer: state of the layer that outlasts a call.
            repeatable: its forward.
            args, kwargs: arguments of the forward.
            tensors: the tensors in `args` and `kwargs`.
        """
        if not any(map(_REQUIRES_GRAD, tensors)) and not any(map(_REQUIRES_GRAD, repeatable.module.parameters())):
            return repeatable.forward(*args, **kwargs)
        session = self._session
        if session.save == "attention":
            attention = AttentionPolicy(self._attention_counts.get(layer.index, 0))
            outputs = run_recomputed(session, layer, repeatable, args, kwargs, tensors, attention)
            self._attention_counts[layer.index] = attention.attention_count
            if not attention.has_cached_ops:
                self._note_fallback(
                    logging.WARNING,
                    "activation offloading: save='attention' has no effect in layer %s, which %s: only its inputs are kept, "
                    "and attention is recomputed. Use attn_implementation='sdpa', or register_attention. Said once",
                    layer.name,
                    attention.refusal or "calls no fused attention that is known",
                )
            return outputs
        decided = None if self.decide is None else self.decide(layer, repeatable.module, tensors)
        if decided is None:
            return run_recomputed(session, layer, repeatable, args, kwargs, tensors)
        if isinstance(decided, LayerProfile):
            return run_recomputed(session, layer, repeatable, args, kwargs, tensors, ProfilingPolicy(decided))
        if decided.keep:
            return run_without_recompute(session, layer, repeatable.forward, args, kwargs, decided)
        planned = PlannedPolicy(decided)
        outputs = run_recomputed(session, layer, repeatable, args, kwargs, tensors, planned)
        if planned.is_off_plan:
            self._note_fallback(
                logging.INFO,
                "activation offloading: layer %s calls other attention or linear maps than when it was measured: from there "
                "on it is recomputed. Said once",
                layer.name,
            )
        return outputs

    def _note_fallback(self, level: int, message: str, *about: str) -> None:
        if not self._has_noted_fallback:
            self._has_noted_fallback = True
            logger.log(level, message, *about)
