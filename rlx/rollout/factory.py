"""From the configuration to a sampler."""

import torch

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.models.loading import load_config
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
        ValueError: an engine that does not exist, or a model config that cannot be loaded.
    """
    if rollout.name != "hf":
        raise ValueError(
            f"actor_rollout_ref.rollout.name is {rollout.name!r}, but the only engine here is 'hf' (transformers); "
            "set actor_rollout_ref.rollout.name=hf"
        )
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    return HFRollout(
        load_config(model),
        device=device,
        dtype=DTYPES.get(rollout.dtype, auto),
        max_num_seqs=rollout.max_num_seqs,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )
