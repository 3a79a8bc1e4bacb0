"""The planner: it chooses which layers to keep, offload or recompute, from costs of layers and a budget.

Arithmetic only: this package imports neither torch nor anything else of rlx.
"""

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan, Operation
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import predict

__all__ = ["Budget", "LayerCost", "LayerPlan", "Operation", "Plan", "make_plan", "predict"]
