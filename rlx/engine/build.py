"""Build a role's model before it is sharded: weights, adapters, fused kernels, tiled MLPs and recomputation."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from rlx.checkpoint.manifest import few
from rlx.config.schema import ModelConfig
from rlx.engine.forward import Head
from rlx.engine.fsdp_units import local
from rlx.models.adapter_folder import load_adapters
from rlx.models.loading import ModelError, apply_liger, load_model, load_skeleton, rope_by_length
from rlx.models.lora import Adapter, add_lora
from rlx.offload import enable_tiling
from rlx.offload.runtime.layers import find_layers
from rlx.offload.streaming.nf4 import QuantizationError, quantize_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class BuiltModel(NamedTuple):
    """A model, its transformer layers, and its adapters by the name of the weight that each changes."""

    plain: "PreTrainedModel"
    layers: list[nn.Module]
    adapters: dict[str, Adapter]


def build_model(
    model: ModelConfig, head: Head, dtype: torch.dtype, seed: int, trains: bool, device: torch.device
) -> BuiltModel:
    """Return the model of a role. All processes call this together.

    Args:
        model: the weights to load and how to run them.
        head: the kind of output.
        dtype: type of the weights.
        seed: of weights that no file holds: a value head and adapters.
        trains: whether the model gets gradients.
        device: which quantises the base of adapters; the model itself is in host memory.

    Raises:
        ModelError: the model cannot be loaded, or does not take the adapters or the quantisation.
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
            _quantize(plain, device)
    if model.enable_gradient_checkpointing and not model.enable_activation_offload:
        _enable_checkpointing(plain)
    layers = [layer for _, layer in find_layers(plain, None)]
    if model.tiled_mlp:
        enable_tiling(plain, None if model.tiled_mlp == "auto" else int(model.tiled_mlp), layers)
    return BuiltModel(plain, layers, adapters)


def require_finite(source: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check this process's share of the weights; all processes join.

    Raises:
        ModelError: a weight is NaN or infinite on some process, so no gradient would be finite.
    """
    faults = []
    for name, tensor in named:
        own = local(tensor)
        if own.is_floating_point() and not (right := own.isfinite()).all():
            faults.append(f"{name} ({int((~right).sum())} of {own.numel()} numbers of a process)")
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, faults)
    if faults := sorted(fault for each in found for fault in each):
        raise ModelError(f"{source} holds NaN or infinite weights: {few(faults)}; take a copy that is whole")


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


def _quantize(plain: "PreTrainedModel", device: torch.device) -> None:
    try:
        quantize_layers(plain, device)
    except QuantizationError as error:
        raise ModelError(str(error)) from None


def _enable_checkpointing(plain: "PreTrainedModel") -> None:
    """Turn on transformers' recomputation. The method's name differs between the versions of transformers we support."""
    enable = getattr(plain, "activation_checkpointing_enable", None) or plain.gradient_checkpointing_enable
    enable({"use_reentrant": False})
