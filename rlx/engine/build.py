"""Build a role's model before it is sharded: weights, adapters, fused kernels, tiled MLPs, recomputation, streamed weights."""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from rlx.checkpoint.manifest import few
from rlx.config.schema import ModelConfig
from rlx.engine.fsdp_units import gathered, local
from rlx.identity import machine_identity
from rlx.models.loading import Head, ModelError, apply_liger, load_model, load_skeleton, rope_by_length
from rlx.models.lora import Adapter, add_lora, load_adapters
from rlx.offload import LayerOffloading, enable_layer_offloading, enable_tiling
from rlx.offload.runtime.layers import find_layers
from rlx.offload.streaming.nf4 import QuantizationError, quantize_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def build_model(
    model: ModelConfig, head: Head, dtype: torch.dtype, seed: int, trains: bool, device: torch.device
) -> tuple["PreTrainedModel", list[nn.Module], dict[str, Adapter]]:
    """Return the model of a role, in host memory, its layers, and its adapters by the name of the weight that each changes.

    All processes call this together. `device` quantises the base of adapters.
    `seed` is that of weights that no file holds: a value head and adapters. Raises ModelError if the model cannot be loaded, or
    does not take the adapters or the quantisation.
    """
    plain = _load(model, head, dtype, seed)
    if dist.get_rank() == 0 and (kind := rope_by_length(plain.config.get_text_config())):
        logger.warning(
            "%s: rope_type %s computes the frequencies of all sequences from the longest one in the micro-batch. Beyond the "
            "length at which they change, the outputs for a sequence depend on its neighbours. Give each sequence a "
            "micro-batch of its own (ppo_micro_batch_size_per_gpu=1, log_prob_micro_batch_size_per_gpu=1)",
            type(plain).__name__,
            kind,
        )
    if model.use_liger:
        apply_liger(plain)
    adapters: dict[str, Adapter] = {}
    if not trains:
        plain.requires_grad_(False)
    elif model.lora_rank:
        with plain.device:
            adapters = add_lora(plain, model, seed)
        if model.lora_adapter_path is not None:
            load_adapters(plain, model)
        if model.quantization is not None:
            try:
                quantize_layers(plain, device)
            except QuantizationError as error:
                raise ModelError(str(error)) from None
    if model.enable_gradient_checkpointing and not model.enable_activation_offload:
        # The name differs between the versions of transformers that rlx supports.
        enable = getattr(plain, "activation_checkpointing_enable", None) or plain.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    layers = [layer for _, layer in find_layers(plain, None)]
    if model.tiled_mlp:
        enable_tiling(plain, None if model.tiled_mlp == "auto" else int(model.tiled_mlp), layers)
    return plain, layers, adapters


def require_finite(source: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check this process's share of the weights; all processes join.

    Raises ModelError if a weight is NaN or infinite on some process: no gradient would be finite.
    """
    faults = []
    for name, tensor in named:
        own = local(tensor)
        if own.is_floating_point() and not (right := own.isfinite()).all():
            faults.append(f"{name} ({int((~right).sum())} of {own.numel()} numbers of a process)")
    if faults := everywhere(faults):
        raise ModelError(f"{source} holds NaN or infinite weights: {few(faults)}; use an intact copy")


def everywhere(faults: list[str]) -> list[str]:
    """Return the faults that processes have found; all of them call this."""
    return sorted({fault for each in gathered(faults) for fault in each})


def _load(model: ModelConfig, head: Head, dtype: torch.dtype, seed: int) -> "PreTrainedModel":
    """Load the weights on rank 0 and a skeleton on other ranks, which receive their weights when the model is sharded."""
    first = dist.get_rank() == 0
    plain = load_model(model, head, dtype, seed) if first else load_skeleton(model, head, dtype)
    tensors = [*plain.named_parameters(), *plain.named_buffers()]
    layout = [[(name, tensor.shape, tensor.dtype) for name, tensor in tensors]]
    own = layout[0]
    dist.broadcast_object_list(layout, src=0)
    # A model class may load some weights in another type, which a skeleton does not know.
    return plain if own == layout[0] else load_model(model, head, dtype, seed)


def stream_frozen(
    model: nn.Module,
    layers: Sequence[nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    directory: str | None = None,
) -> LayerOffloading:
    """Move the frozen weights of layers to host memory or a disk, in the type of computation, before the model is sharded.

    The processes of a machine share one copy. Rank 0 has the weights; other processes may have them on the meta device. FSDP2
    alone can ignore parameters. Raises OSError if host memory or the disk has no room.
    """
    group = None
    if dist.get_world_size() > 1:
        machines = gathered(machine_identity())
        _fill_frozen(model, layers, device, is_everywhere=len(set(machines)) > 1)
        for machine in dict.fromkeys(machines):
            made = dist.new_group([rank for rank, name in enumerate(machines) if name == machine])
            group = made if machine == machines[dist.get_rank()] else group
    return enable_layer_offloading(model, layers, device=device, dtype=dtype, group=group, directory=directory)


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
