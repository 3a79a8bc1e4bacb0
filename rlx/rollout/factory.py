"""From the configuration to a sampler."""

import torch
from transformers import AutoConfig

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import Rollout

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_rollout(rollout: RolloutConfig, model: ModelConfig, device: torch.device) -> Rollout:
    """The sampler that `rollout.name` asks for, without weights yet.

    Args:
        rollout: engine, dtype ("auto": bf16 on accelerators, fp32 on CPU) and batch limit.
        model: its folder's config decides the architecture; no weights are read.
        device: where it decodes.

    Raises:
        ValueError: an engine that does not exist, or a key of `override_config` that the model's config lacks.
    """
    if rollout.name != "hf":
        raise ValueError(
            f"actor_rollout_ref.rollout.name is {rollout.name!r}, but the only engine here is 'hf' (transformers); "
            "set actor_rollout_ref.rollout.name=hf"
        )
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    for key, value in model.override_config.items():
        if not hasattr(config, key):
            raise ValueError(f"model.override_config.{key}: {type(config).__name__} of {model.path} has no such key")
        setattr(config, key, value)
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    return HFRollout(
        config,
        device=device,
        dtype=DTYPES.get(rollout.dtype, auto),
        max_num_seqs=rollout.max_num_seqs,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )
