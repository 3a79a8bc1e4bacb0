"""Shard a model over processes with FSDP1 or FSDP2."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from rlx.config.schema import FSDPConfig
from rlx.engine.fsdp1 import FSDP1Model
from rlx.engine.fsdp2 import FSDP2Model
from rlx.engine.sharded import Precision, Sharded
from rlx.offload import LayerOffloading, enable_layer_offloading


def shard(
    model: nn.Module,
    strategy: str,
    fsdp: FSDPConfig,
    precision: Precision,
    device: torch.device,
    streaming: LayerOffloading | None = None,
) -> Sharded:
    """Shard a model over all processes.

    Args:
        model: with rank 0's weights in host memory; other ranks may hold it on the meta device.
        strategy: `fsdp2` or `fsdp`.
        fsdp: the configuration.
        precision: the result of `precision_of`.
        device: of this process.
        streaming: of the frozen weights that are not sharded but wait on the host.

    Raises:
        ValueError: the configuration does not fit the number of processes or the strategy.
    """
    kinds = {"fsdp2": FSDP2Model, "fsdp": FSDP1Model}
    if strategy not in kinds:
        raise ValueError(f"strategy: got {strategy!r}, expected fsdp2 or fsdp")
    if streaming is None:
        return kinds[strategy](model, fsdp, precision, device)
    return FSDP2Model(model, fsdp, precision, device, streaming.parameters)


def stream_frozen(
    model: nn.Module, layers: Sequence[nn.Module], strategy: str, precision: Precision, device: torch.device
) -> LayerOffloading:
    """Move the frozen weights of layers to host memory, in the type of computation, before the model is sharded.

    Raises:
        ValueError: there are several processes, or FSDP1, which has no parameters that it leaves alone.
    """
    if strategy != "fsdp2" or dist.get_world_size() > 1:
        raise ValueError(
            f"layer_offload: got strategy={strategy} and {dist.get_world_size()} process(es), expected fsdp2 and one process; "
            "set layer_offload=False"
        )
    return enable_layer_offloading(model, layers, device=device, dtype=precision.compute)
