"""Ranks that agree on events: what the tests let each rank do."""

import torch.distributed as dist

from rlx.rollout.protocol import FirstRank


def decided(size):
    """Whether this rank decides, the decision, and the error of one that fails."""
    first = FirstRank(size)

    def failing():
        raise ValueError("not this one")

    try:
        first.decide(failing)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return first.is_this, first.decide(lambda: f"of rank {dist.get_rank()}"), text
