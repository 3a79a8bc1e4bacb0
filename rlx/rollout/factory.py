"""Build the sampler that the configuration names."""

from typing import TYPE_CHECKING

import torch

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.config.vllm_range import supported_vllm
from rlx.models.loading import load_config
from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_rollout(
    rollout: RolloutConfig,
    model: ModelConfig,
    device: torch.device,
    context_length: int,
    seed: int = 0,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> Rollout:
    """Return the sampler of `rollout.name`, still without weights. All processes build theirs together.

    Args:
        rollout: the sampler's name and options.
        model: its folder's config gives the architecture; its weights are read only if the trainer sends adapters alone.
        device: where it decodes.
        context_length: longest prompt and response together [tokens].
        seed: of the engine itself.
        tokenizer: for stop strings and bad words.

    Raises:
        ValueError: no such sampler, or it does not support the model or the options.
        ImportError: vLLM is not installed in a version that rlx works with.
    """
    config = load_config(model)
    vocabulary = config.get_text_config().vocab_size
    if beyond := [token for token in rollout.val_kwargs.logit_bias if int(token) >= vocabulary]:
        raise ValueError(
            f"actor_rollout_ref.rollout.val_kwargs.logit_bias: got token {beyond[0]}, expected one of {model.path}, which has "
            f"tokens below {vocabulary}"
        )
    if rollout.name == "vllm":
        supported_vllm()
        from rlx.rollout.vllm import VLLMRollout  # takes seconds

        return VLLMRollout(rollout, model, device, context_length, seed, tokenizer)
    if rollout.name != "hf":
        raise ValueError(f"actor_rollout_ref.rollout.name: got {rollout.name!r}, expected hf or vllm")
    sampler = HFRollout(
        config,
        device=device,
        dtype=sampler_dtype(rollout, device),
        max_num_seqs=rollout.max_num_seqs,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        with_experts=rollout.enable_rollout_routing_replay,
        tokenizer=tokenizer,
    )
    if model.sends_adapters:
        sampler.add_adapters(model)
    return sampler


def sampler_dtype(rollout: RolloutConfig, device: torch.device) -> torch.dtype:
    """Return the type of a sampler's weights; `auto` is bf16 on accelerators, fp32 on CPU."""
    return SAMPLER_DTYPES.get(rollout.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
