"""Check a model before workers load it, without making weights; only weights that the config ties are read."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from rlx.config.schema import ModelConfig
from rlx.config.schema.roles import TINY
from rlx.errors import did_you_mean
from rlx.models.experts import LEAVE_EXPERTS_ALONE
from rlx.models.hf_folder import FolderParts
from rlx.models.loading import Head, ModelError, class_and_config, fault_of_ties, load_skeleton, why_not_shared
from rlx.models.lora import adapter_targets, add_lora, expert_targets, load_adapters
from rlx.models.tiny import make_tiny_config, make_tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SHARDS_BYTES = "2.13"  # of torch, https://github.com/pytorch/pytorch/issues/185239


def faults_of(
    model: ModelConfig,
    head: Head,
    sizes: Collection[int] = (),
    processes: int = 1,
    needs_experts: bool = False,
    sampler: str | None = None,
) -> list[str]:
    """Return the faults of a model's config, attention kernel and adapter targets, and of sharing its sequences.

    Only loading finds a kernel without its package or a checkpoint that lacks weights. `sizes` are numbers of processes that share
    each of its sequences, over the roles that use the model. The `sampler` of this name takes its weights; None: none does.
    """
    if model.path == TINY:  # it has no folder before the warm start
        if _asks_nothing(model) and not needs_experts and max(sizes, default=1) == 1:
            return []  # before transformers imports a model, which takes a second
        with TemporaryDirectory() as folder:
            make_tiny_config(model.tiny, make_tiny_tokenizer()).save_pretrained(Path(folder))
            return faults_of(replace(model, path=folder), head, sizes, processes, needs_experts, sampler)
    faults = [*_of_attention(model.attn_implementation), *_of_bytes_in_shards(model)]
    try:
        _, config = class_and_config(model, head)
        faults += _of_capped_scores(model.attn_implementation, config.get_text_config())
        faults += _of_chosen_keys(config.get_text_config())
        if not model.trust_remote_code:  # whose code may have activations of its own
            _require_activation(config.get_text_config())
        shared = (why_not_shared(size, processes, config.get_text_config()) for size in sorted(sizes) if size > 1)
        faults += filter(None, shared)
        # This machine may lack kernels that the workers have.
        here = model.attn_implementation if model.attn_implementation == "sdpa" else "eager"
        skeleton = load_skeleton(replace(model, attn_implementation=here), head, torch.float32)
        faults += filter(None, [fault_of_ties(model, skeleton)])
        recomputes = model.enable_gradient_checkpointing and not model.enable_activation_offload
        if recomputes and not skeleton.supports_gradient_checkpointing:
            faults.append(
                f"enable_gradient_checkpointing: got True for a {type(skeleton).__name__}, which has no checkpointing in "
                "transformers, expected a model that has; set enable_activation_offload=True, which recomputes its layers, or "
                "enable_gradient_checkpointing=False"
            )
        if head != "score":  # before adapters change the skeleton
            FolderParts.of(skeleton, head, None, trust_remote_code=model.trust_remote_code).try_writing()
        if model.lora_rank > 0:
            faults += _of_targets(skeleton, model, sampler)
        if model.lora_rank > 0 and model.lora_adapter_path is not None:
            with torch.device("meta"):
                add_lora(skeleton, model)
            load_adapters(skeleton, model)
        if needs_experts and not any(name.endswith(".experts") for name, _ in skeleton.named_modules()):
            faults.append(
                f"got a {type(skeleton).__name__} without experts, expected a mixture of experts; {LEAVE_EXPERTS_ALONE}"
            )
    except ModelError as error:
        faults.append(str(error))
    return faults


def _of_targets(skeleton: "PreTrainedModel", model: ModelConfig, sampler: str | None) -> list[str]:
    """Reject adapters of experts that the sampler cannot take; raise ModelError if a target does not exist."""
    adapter_targets(skeleton, model.target_modules)
    experts = expert_targets(skeleton, model.target_modules)
    if not experts or sampler != "vllm" or not model.sends_adapters:
        return []
    return [
        f"target_modules: got experts ({experts[0]}) with vLLM, which takes no adapters of theirs in peft's form; set "
        "lora.merge=True, which sends merged weights, or rollout.name=hf"
    ]


def _of_bytes_in_shards(model: ModelConfig) -> list[str]:
    """Reject a quantised base that FSDP2 of older releases would shard: it takes bytes for parameters that want gradients."""
    if model.quantization is None or model.layer_offload or torch.__version__ >= SHARDS_BYTES:
        return []
    return [
        f"quantization: got {model.quantization} with torch {torch.__version__}, whose FSDP2 shards no bytes, expected torch "
        f"{SHARDS_BYTES} or newer; set layer_offload=True, which leaves the base unsharded, or update torch"
    ]


def _asks_nothing(model: ModelConfig) -> bool:
    """Whether the keys that could be wrong for a model of this shape have their defaults."""
    free = ("path", "tiny", "enable_gradient_checkpointing", "enable_activation_offload", "activation_offload")
    return replace(ModelConfig(), **{name: getattr(model, name) for name in free}) == model


def _of_capped_scores(kernel: str, config: "PreTrainedConfig") -> list[str]:
    """Reject a kernel that silently ignores a cap of attention scores."""
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is None or kernel != "sdpa":
        return []
    return [
        f"attn_implementation: got sdpa for a {config.model_type} model that caps its attention scores at {cap}, which sdpa cannot "
        "do, expected a kernel that caps them; set it to eager, or on a GPU to flex_attention or flash_attention_2"
    ]


def _of_chosen_keys(config: "PreTrainedConfig") -> list[str]:
    """Reject Doge's choice of keys: which of equal tokens it keeps depends on the kernel, on padding and on the cache."""
    kept, longest = getattr(config, "keep_window_size", None), getattr(config, "max_position_embeddings", 0)
    if kept is None or kept >= longest:
        return []
    return [
        f"keep_window_size: got {kept} for a {config.model_type} model of {longest} positions, which keeps the {kept} keys of the "
        f"highest score, expected at least {longest}: equal tokens score alike, so log-probs would depend on padding. Set "
        f"model.override_config.max_position_embeddings={kept} and train on sequences of at most that length"
    ]


def _require_activation(config: "PreTrainedConfig") -> None:
    """Raise ModelError for an activation that transformers does not know."""
    from transformers.activations import ACT2FN

    for key in ("hidden_act", "hidden_activation", "activation_function"):
        name = getattr(config, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            remedy = did_you_mean(name, ACT2FN, f"correct it in config.json, or set override_config.{key}")
            raise ModelError(f"{key} in config.json: got {name!r}, expected an activation of transformers; {remedy}")


def _of_attention(name: str) -> list[str]:
    from transformers import AttentionInterface

    # The kernels of continuous batching need a cache that neither training nor the samplers have.
    known = ["eager", *(key for key in AttentionInterface().valid_keys() if not key.startswith("paged|"))]
    if name in known or "/" in name:  # a kernel of the hub
        return []
    remedy = did_you_mean(name, known, "set it to sdpa")
    return [f"attn_implementation: got {name!r}, expected one of {', '.join(known)}, or a kernel of the hub; {remedy}"]
