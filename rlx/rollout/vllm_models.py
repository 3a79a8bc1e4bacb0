"""Which models vLLM has, and how those run that it builds from transformers' classes."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rlx.config.vllm_range import supported_vllm
from rlx.rollout.vllm_api import models_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def lacking_model(architectures: Sequence[str]) -> str | None:
    """Return an error message if this vLLM has a model for none of these architectures, or cannot import it; else None."""
    found, version = models_of(architectures), supported_vllm()
    if not found and architectures:
        return f"vLLM {version} has no model {' or '.join(architectures)}; set actor_rollout_ref.rollout.name=hf"
    try:
        for each in found:
            if hasattr(each, "load_model_cls"):
                each.load_model_cls()
    except ImportError as error:  # vLLM itself would only say that it failed
        return f"vLLM {version} cannot import its model: {error}; install what it lacks, or set actor_rollout_ref.rollout.name=hf"
    return None


def runs_on_transformers(architectures: Sequence[str]) -> bool:
    """Whether vLLM builds a model from transformers' class, such as OLMo 2 since 0.32."""
    found = models_of(architectures)
    return bool(found) and all(".transformers" in getattr(each, "module_name", "") for each in found)


def with_own_class(overrides: Mapping[str, Any]) -> Callable[["PreTrainedConfig"], "PreTrainedConfig"]:
    """Return vLLM's `hf_overrides` for a model that it builds from transformers' class.

    vLLM changes the class of such a model so that it only works in vLLM. The trainer has a model of this class in the same
    process, so vLLM gets a subclass.

    Args:
        overrides: values of the config's attributes.
    """
    return partial(_overridden, overrides)


def _overridden(overrides: Mapping[str, Any], config: "PreTrainedConfig") -> "PreTrainedConfig":
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return config  # vLLM calls the function with an empty config first
    for name, value in overrides.items():
        part = getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            part.update(value)
        else:
            setattr(config, name, value)
    config.__class__ = _own_config(type(config))
    return config


@cache
def _own_config(kind: type["PreTrainedConfig"]) -> type["PreTrainedConfig"]:
    """Return a subclass of a config's class for which transformers makes a model of a class of its own."""
    from transformers import MODEL_MAPPING, AutoModel

    model = MODEL_MAPPING[kind]
    # Of the same name, or from a module of transformers, it would count as the original.
    own = type(f"VLLM{kind.__name__}", (kind,), {"__module__": __name__})
    AutoModel.register(own, type(model.__name__, (model,), {"__module__": model.__module__, "config_class": own}))
    return own
