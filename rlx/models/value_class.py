"""Critics of architectures for which transformers has no model with a number per token."""

from typing import TYPE_CHECKING

from rlx.errors import ExplainedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class NoValueClassError(ExplainedError, ValueError):
    """There is no model with a number per token for an architecture, and none can be made."""


def ensure_value_class(config: "PreTrainedConfig") -> None:
    """Let `AutoModelForTokenClassification` know a class for an architecture, in this process.

    Of the decoders in transformers most have none. Theirs is the base model and a linear layer, made of the same mixin as
    those that transformers has; its weights are called as there, so that whoever knows one loads the other.

    Args:
        config: of the model.

    Raises:
        NoValueClassError: for an encoder with a decoder, and for a type that has no base model.
    """
    from transformers import (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        AutoModelForTokenClassification,
        PreTrainedModel,
    )
    from transformers.modeling_layers import GenericForTokenClassification

    kind = type(config)
    own = getattr(config, "auto_map", None) or {}
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING or "AutoModelForTokenClassification" in own:
        return
    if config.is_encoder_decoder or kind not in MODEL_MAPPING:
        raise NoValueClassError(
            f"got a model of type {config.model_type} for a critic, expected a decoder that transformers has a base model for; "
            "set critic.model.path to a model of another type with the same tokenizer, or an algorithm.adv_estimator "
            "without critic, as grpo or reinforce_plus_plus"
        )
    base = MODEL_MAPPING[kind]
    base = base[0] if isinstance(base, tuple | list) else base
    # What all heads of the architecture share: names of weights, attention kernels, how FSDP cuts it.
    parent = next(ancestor for ancestor in base.__mro__[1:] if issubclass(ancestor, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForTokenClassification"
    made = type(name, (GenericForTokenClassification, parent), {"config_class": kind})
    # exist_ok: without it a class for an architecture of transformers itself is passed over in silence.
    AutoModelForTokenClassification.register(kind, made, exist_ok=True)
