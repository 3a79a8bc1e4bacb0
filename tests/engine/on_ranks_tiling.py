"""An engine whose MLPs and norms are computed in tiles."""

import torch.distributed as dist
from rank_tools import FP64, build, make_batch, own_share, policy, weights_of
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.engine.micro_batches import MicroBatchRule


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "allgather" in str(function).replace("_", "")
        return function(*args, **(kwargs or {}))


def trained(folder, strategy, model):
    """Log-probs, gradient norms of two updates, weights after them and all-gathers of the second."""
    engine = build(folder, FP64, strategy, model=model)
    share = own_share(make_batch(), (8,) if dist.get_world_size() == 1 else (5, 3))
    micro = MicroBatchRule(rows=3)
    before = engine.log_probs(share, micro, 1.0)["log_probs"]
    first = engine.update(share, micro, policy())
    with Gathers() as gathers:
        second = engine.update(share, micro, policy())
    return before, (first["grad_norm"], second["grad_norm"]), weights_of(engine), gathers.count
