"""Counts and metrics over all processes. Every process calls each function."""

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.data.batch import Batch
from rlx.engine.objectives import Objective, Totals


def totals_of(batch: Batch, objective: Objective, copies: int, device: torch.device) -> Totals:
    """Return the counts of a mini-batch of which each process has a share, and `copies` processes the same one."""
    mask_BR = objective.mask(batch)
    counts = torch.stack([objective.denominator(mask_BR), mask_BR.sum()]).double().to(device)
    dist.all_reduce(counts)
    return Totals(*(counts / copies).clamp(min=1).tolist())


def over_processes(each: dict[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
    """Return each scalar reduced over the processes, which have the same names. Waits for the device."""
    if not each:
        return {}
    names = sorted(each)
    figures = torch.stack([each[name] for name in names])
    dist.all_reduce(figures, op=op)
    return dict(zip(names, figures.tolist(), strict=True))
