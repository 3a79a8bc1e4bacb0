"""Measure how far an optimizer step moves the weights, from a sample of them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rlx.engine.units import local

MOST_TENSORS = 64  # at most; each gives up to ELEMENTS evenly spaced elements of this process's shard
ELEMENTS = 512


class UpdateProbe:
    """Compares a sample of the weights before and after a step: at most 32,768 numbers of each process.

    A small `share` means that updates are lost to rounding: bf16 weights without masters at a low learning rate.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        shards = [local(p).detach() for p in parameters if local(p).numel()]
        self._shards = shards[:: -(-len(shards) // MOST_TENSORS) or 1]
        self._before = self._sample()

    def sums(self, device: torch.device) -> dict[str, Tensor]:
        """Return sums to add over processes: `changed` and `sampled` elements, squares of `moved` and of `weights`."""
        after = self._sample()
        moved = after.double() - self._before.double()
        figures = {
            "changed": (moved != 0).sum().double(),
            "sampled": torch.tensor(float(moved.numel()), dtype=torch.float64),
            "moved": moved.square().sum(),
            "weights": self._before.double().square().sum(),
        }
        return {name: figure.to(device) for name, figure in figures.items()}

    def _sample(self) -> Tensor:
        if not self._shards:
            return torch.zeros(0)
        picked = (shard.view(-1)[:: -(-shard.numel() // ELEMENTS)] for shard in self._shards)
        return torch.cat([part.float() if part.dtype != torch.float64 else part for part in picked])


def update_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return `update_share`, the share of weights that changed, and `update_length`, |after - before| / |before|."""
    return {
        "update_share": sums["changed"] / max(1.0, sums["sampled"]),
        "update_length": (sums["moved"] / sums["weights"]) ** 0.5 if sums["weights"] else 0.0,
    }
