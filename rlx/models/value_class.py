"""Make value models of architectures that have no model with a number per token in transformers."""

import copy
from typing import TYPE_CHECKING

import torch

from rlx.errors import ExplainedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class NoValueClassError(ExplainedError, ValueError):
    """An architecture has no model with a number per token, and none can be made."""


def ensure_value_class(config: "PreTrainedConfig") -> None:
    """Register a class for an architecture with `AutoModelForTokenClassification`, in this process.

    Most decoders of transformers have none. The new class is the base model with a linear layer, made from the same mixin as
    transformers' own classes. Its weights have the same names, so a checkpoint of one loads into the other.

    Args:
        config: of the model.

    Raises:
        NoValueClassError: the model is an encoder with a decoder, or its type has no base model.
    """
    from transformers import (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        AutoModelForTokenClassification,
        PreTrainedModel,
    )
    from transformers.modeling_layers import GenericForTokenClassification

    kind = type(config)
    auto_map = getattr(config, "auto_map", None) or {}
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING or "AutoModelForTokenClassification" in auto_map:
        return
    # The layer's width is read from hidden_size, which BLT's config lacks.
    if config.is_encoder_decoder or kind not in MODEL_MAPPING or not hasattr(config.get_text_config(), "hidden_size"):
        raise NoValueClassError(
            f"critic: got a model of type {config.model_type}, expected a decoder with a base model in transformers and a "
            "hidden_size in its config; set critic.model.path to a model of another type with the same tokenizer, or an algorithm.adv_estimator "
            "without critic, such as grpo or reinforce_plus_plus"
        )
    base = MODEL_MAPPING[kind]
    base = base[0] if isinstance(base, tuple | list) else base
    # The base class of all heads of the architecture: names of weights, attention kernels, the classes that FSDP shards.
    parent = next(ancestor for ancestor in base.__mro__[1:] if issubclass(ancestor, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForTokenClassification"
    # From another module transformers would not set buffers of layers that the base model sets, such as Falcon-H1's mup_vector.
    own = {"config_class": kind, "base_model_prefix": _backbone(config, base), "__module__": base.__module__}
    made = type(name, (GenericForTokenClassification, parent), own)
    # exist_ok: without it transformers silently ignores a class for one of its own architectures.
    AutoModelForTokenClassification.register(kind, made, exist_ok=True)
    if kind not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise NoValueClassError(
            f"critic: this version of transformers has no class with a number per token for {config.model_type}, and takes "
            "none for its own types; install a newer one (5.19 does), or set an algorithm.adv_estimator without critic, such "
            "as grpo or reinforce_plus_plus"
        )


def _backbone(config: "PreTrainedConfig", base: type) -> str:
    """Return the name of the base model in the language model, whose weights the critic loads.

    Raises:
        NoValueClassError: there is none, as in BART's decoder.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    name = next((name for name, child in model.named_children() if isinstance(child, base)), None)
    if name is None:
        raise NoValueClassError(
            f"critic: got a {type(model).__name__}, which has no {base.__name__} inside, expected a language model on a base "
            "model with the same weights; set critic.model.path to a model of another type with the same tokenizer, or an "
            "algorithm.adv_estimator without critic, such as grpo or reinforce_plus_plus"
        )
    return name
