"""The planner: it chooses which layers to keep, offload or recompute, from costs of layers and a budget.

Arithmetic only: this package imports neither torch nor anything else of rlx.
"""

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan, Operation, Point
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import Prediction, held_bytes, predict, recompute_s, sent_bytes

__all__ = [
    "Budget",
    "LayerCost",
    "LayerPlan",
    "Operation",
    "Plan",
    "Point",
    "Prediction",
    "held_bytes",
    "make_plan",
    "predict",
    "recompute_s",
    "sent_bytes",
]
