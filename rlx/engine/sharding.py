"""Shard a model over processes with FSDP1 or FSDP2."""

import torch
from torch import nn

from rlx.config.schema import FSDPConfig
from rlx.engine.fsdp1 import FSDP1Model
from rlx.engine.fsdp2 import FSDP2Model
from rlx.engine.sharded import Precision, Sharded


def shard(model: nn.Module, strategy: str, fsdp: FSDPConfig, precision: Precision, device: torch.device) -> Sharded:
    """Shard a model over all processes.

    Args:
        model: with rank 0's weights in host memory; other ranks may hold it on the meta device.
        strategy: `fsdp2` or `fsdp`.
        fsdp: the configuration.
        precision: the result of `precision_of`.
        device: of this process.

    Raises:
        ValueError: the configuration does not fit the number of processes or the strategy.
    """
    kinds = {"fsdp2": FSDP2Model, "fsdp": FSDP1Model}
    if strategy not in kinds:
        raise ValueError(f"strategy: got {strategy!r}, expected fsdp2 or fsdp")
    return kinds[strategy](model, fsdp, precision, device)
