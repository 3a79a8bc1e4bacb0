"""A role's model as it is before it is sharded: loaded, with adapters, fused kernels, tiles and recomputation as configured."""

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from rlx.config.schema import ModelConfig
from rlx.engine.forward import Head
from rlx.engine.sharding import transformer_layers
from rlx.models.liger import apply_liger
from rlx.models.loading import load_model, load_skeleton, rope_by_length
from rlx.models.lora import Adapter, add_lora
from rlx.offload import enable_tiling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class Made(NamedTuple):
    """A model, its transformer layers, and its adapters by the name of the weight they change."""

    plain: "PreTrainedModel"
    layers: list[nn.Module]
    adapters: dict[str, Adapter]


def make_model(model: ModelConfig, head: Head, dtype: torch.dtype, seed: int, trains: bool) -> Made:
    """The model of a role; all processes make theirs together.

    Args:
        model: what to load and how to run it.
        head: what it ends in.
        dtype: of its weights.
        seed: of what is not loaded, a value head and adapters.
        trains: it gets gradients.
    """
    plain = _load(model, head, dtype, seed)
    if dist.get_rank() == 0 and (kind := rope_by_length(plain.config.get_text_config())):
        logger.warning(
            "%s: with rope_type %s the longest sequence of a micro-batch decides on the frequencies of all: beyond the length from "
            "which these change, what is said of a sequence depends on its neighbours; give each a micro-batch of its own "
            "(ppo_micro_batch_size_per_gpu=1, log_prob_micro_batch_size_per_gpu=1)",
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
    if model.enable_gradient_checkpointing and not model.enable_activation_offload:
        _enable_checkpointing(plain)
    layers = list(transformer_layers(plain).values())
    if model.tiled_mlp:
        enable_tiling(plain, None if model.tiled_mlp == "auto" else int(model.tiled_mlp), layers)
    return Made(plain, layers, adapters)


def _load(model: ModelConfig, head: Head, dtype: torch.dtype, seed: int) -> "PreTrainedModel":
    """The model with weights on rank 0, and without them on the other ranks, which get theirs as it is sharded."""
    first = dist.get_rank() == 0
    plain = load_model(model, head, dtype, seed) if first else load_skeleton(model, head, dtype)
    tensors = [*plain.named_parameters(), *plain.named_buffers()]
    layout = [[(name, tensor.shape, tensor.dtype) for name, tensor in tensors]]
    own = layout[0]
    dist.broadcast_object_list(layout, src=0)
    # A model class may keep some weights in a type of its own when it loads them, which a skeleton cannot know.
    return plain if own == layout[0] else load_model(model, head, dtype, seed)


def _enable_checkpointing(plain: "PreTrainedModel") -> None:
    """Recomputation by transformers, which renamed the method within the range of versions that rlx takes."""
    options = {"use_reentrant": False}
    if hasattr(plain, "activation_checkpointing_enable"):
        plain.activation_checkpointing_enable(options)
    else:
        plain.gradient_checkpointing_enable(options)
