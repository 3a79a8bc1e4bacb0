"""What becomes of each layer: the planner, what it knows of machines and models, and its command."""

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
