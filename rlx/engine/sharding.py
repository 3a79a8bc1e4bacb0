"""Shard a model over processes with FSDP1 or FSDP2, or leave it whole where there is one process."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from rlx.config.schema import FSDPConfig
from rlx.engine.fsdp1 import FSDP1Model
from rlx.engine.fsdp2 import FSDP2Model
from rlx.engine.sharded import Precision, Sharded, casts
from rlx.engine.single import SingleModel
from rlx.identity import machine_identity
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

    With `fsdp2` a single process has nothing to shard. FSDP2 is used there only to cast weights to the type of computation
    layer by layer, or for its offload policy.

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
    if strategy not in ("fsdp", "fsdp2"):
        raise ValueError(f"strategy: got {strategy!r}, expected fsdp2 or fsdp")
    streamed = frozenset() if streaming is None else streaming.parameters
    if strategy == "fsdp":
        return FSDP1Model(model, fsdp, precision, device)
    if dist.get_world_size() == 1 and not fsdp.offload_policy:
        # FSDP2 rounds gradients of weights that are cast to a wider type, as it does with several processes.
        widens = precision.compute.itemsize > precision.stored.itemsize
        if not casts(precision, model) or not (widens or fsdp.reshards(1)):
            return SingleModel(model, precision, device, streamed)
    return FSDP2Model(model, fsdp, precision, device, streamed)


def stream_frozen(
    model: nn.Module,
    layers: Sequence[nn.Module],
    strategy: str,
    precision: Precision,
    device: torch.device,
    directory: str | None = None,
) -> LayerOffloading:
    """Move the frozen weights of layers to host memory or a disk, in the type of computation, before the model is sharded.

    The processes of a machine share one copy. Rank 0 has the weights; other processes may have them on the meta device.

    Raises:
        ValueError: FSDP1, which has no parameters that it leaves alone.
        OSError: host memory or the disk has no room.
    """
    if strategy != "fsdp2":
        raise ValueError(f"layer_offload: got strategy={strategy}, expected fsdp2; set layer_offload=False")
    group = None
    if dist.get_world_size() > 1:
        machines: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(machines, machine_identity())
        _fill_frozen(model, layers, device, is_everywhere=len(set(machines)) > 1)
        for machine in dict.fromkeys(machines):
            made = dist.new_group([rank for rank, name in enumerate(machines) if name == machine])
            group = made if machine == machines[dist.get_rank()] else group
    return enable_layer_offloading(
        model,
        layers,
        device=device,
        dtype=precision.compute,
        group=cast(dist.ProcessGroup | None, group),
        directory=directory,
    )


def _fill_frozen(model: nn.Module, layers: Sequence[nn.Module], device: torch.device, is_everywhere: bool) -> None:
    """Give frozen weights of layers that are on the meta device memory on the host, untouched, so that it takes no room.

    With `is_everywhere` each process gets rank 0's values, because other machines have no copy to share.
    """
    inside = [parameter for layer in layers for parameter in layer.parameters() if not parameter.requires_grad]
    made = {parameter: parameter for parameter in inside}
    for parameter in made:
        if parameter.is_meta:
            made[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
        if is_everywhere:
            value = made[parameter].detach().to(device)
            dist.broadcast(value, src=0)
            made[parameter].data.copy_(value)
    for part in model.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if made.get(parameter, parameter) is not parameter:
                setattr(part, name, made[parameter])
