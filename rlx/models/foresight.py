"""What can be seen of a model before workers load it: no weights are read, none are made."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rlx.config.schema import ModelConfig
from rlx.config.schema.roles import TINY
from rlx.errors import did_you_mean
from rlx.models.loading import Head, ModelError, class_and_config, load_skeleton, why_not_shared
from rlx.models.lora import adapter_targets
from rlx.models.tiny import make_tiny_config, make_tiny_tokenizer


def faults_of(model: ModelConfig, head: Head, together: Collection[int] = (), processes: int = 1) -> list[str]:
    """What is wrong with a model's config, the kernel of attention, the layers that adapters are to go to, and the number of
    processes that are to share its sequences.

    A kernel that has a name but no package, and a checkpoint that lacks weights, show when the model is loaded.

    Args:
        model: as configured, `builtin:tiny` too.
        head: what it is to end in.
        together: processes that share each of its sequences, in the roles that read it.
        processes: all of the run.
    """
    if model.path == TINY:  # which has no folder before the warm start
        with TemporaryDirectory() as folder:
            make_tiny_config(model.tiny, make_tiny_tokenizer()).save_pretrained(Path(folder))
            return faults_of(replace(model, path=folder), head, together, processes)
    faults = _of_attention(model.attn_implementation)
    try:
        _, config = class_and_config(model, head)
        shared = (why_not_shared(size, processes, config.get_text_config()) for size in sorted(together) if size > 1)
        faults += filter(None, shared)
        if model.lora_rank > 0 and model.target_modules != "all-linear":
            # The kernel has no say in what layers there are, and this machine may lack it.
            skeleton = load_skeleton(replace(model, attn_implementation="eager"), head, torch.float32)
            adapter_targets(skeleton, model.target_modules)
    except ModelError as error:
        faults.append(str(error))
    return faults


def _of_attention(name: str) -> list[str]:
    from transformers import AttentionInterface

    # Those of continuous batching need a cache that neither training nor the samplers have.
    known = ["eager", *(key for key in AttentionInterface().valid_keys() if not key.startswith("paged|"))]
    if name in known or "/" in name:  # of the hub's kernels
        return []
    remedy = did_you_mean(name, known, "set it to sdpa")
    return [f"attn_implementation: got {name!r}, expected one of {', '.join(known)}, or a kernel of the hub; {remedy}"]
