"""Which models vLLM has, and how those run that it builds from transformers' classes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlx.config.vllm_range import supported_vllm
from rlx.rollout.vllm_api import models_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# Types whose norm behind the state space is over all channels in transformers but over each group of them in vLLM, and the key of
# the number of groups.
_NORM_OVER_ALL_GROUPS = {"bamba": "mamba_n_groups", "granitemoehybrid": "mamba_n_groups", "mamba2": "n_groups"}
# What vLLM has no kernel for on CPU, by type.
_GPU_KERNELS = dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "selective scan") | {"olmo_hybrid": "gated delta rule"}
# Types whose checkpoints join weights that transformers' model has apart; vLLM reads those of checkpoints.
_JOINED_WEIGHTS = ("hrm_text",)
_HF = "set actor_rollout_ref.rollout.name=hf"


def fault_of(config: "PreTrainedConfig", device: torch.device) -> str | None:
    """Return an error message if this vLLM cannot sample from a model, or computes it otherwise than transformers; else None."""
    if fault := _lacking_model(config.architectures or ()):
        return fault
    key, limit = _NORM_OVER_ALL_GROUPS.get(config.model_type), getattr(config, "time_step_limit", None)
    if key and (groups := getattr(config, key)) > 1:
        return (
            f"{key}: got {groups} groups, which vLLM normalises each alone and transformers together, expected 1; {_HF}"
        )
    if limit is not None and tuple(limit) != (0.0, math.inf):
        return f"time_step_limit: got {tuple(limit)}, which vLLM does not apply, expected (0.0, inf); {_HF}"
    if config.model_type in _JOINED_WEIGHTS:
        return f"vLLM reads the joined weights of checkpoints, and the trainer's model has them apart; {_HF}"
    if device.type == "cpu" and (kernel := _GPU_KERNELS.get(config.model_type)):
        return f"on CPU vLLM has no kernel for its {kernel}; {_HF}"
    return None


def _lacking_model(architectures: Sequence[str]) -> str | None:
    """Return an error message if this vLLM has a model for none of these architectures, or cannot import it; else None."""
    version = supported_vllm()
    try:
        found = models_of(architectures)
    except ImportError as error:  # vLLM itself would only say that it failed
        return f"vLLM {version} cannot import its model: {error}; install what it lacks, or {_HF}"
    return None if found or not architectures else f"vLLM {version} has no model {' or '.join(architectures)}; {_HF}"


def runs_on_transformers(architectures: Sequence[str]) -> bool:
    """Whether vLLM builds a model from transformers' class, such as OLMo 2 since 0.32."""
    found = models_of(architectures)
    return bool(found) and all(".transformers" in each.__module__ for each in found)


def carries_states(architectures: Sequence[str]) -> bool:
    """Whether vLLM's model carries a state from token to token, as Mamba's and Falcon-H1's do."""
    return any(getattr(each, "has_inner_state", False) for each in models_of(architectures))


def with_needs(options: dict[str, Any], config: "PreTrainedConfig", device: torch.device) -> dict[str, Any]:
    """Return engine arguments with those added without which vLLM does not run a model, or runs it wrongly."""
    if config.model_type != "lfm2":
        return options
    # Keys of transformers' former configuration, which vLLM still reads.
    widths = {name: config.hidden_size for name in ("block_dim", "conv_dim") if not hasattr(config, name)}
    # This model passes a rotation its heads in a dimension of their own, which vLLM's kernel for CPU takes for one head.
    # vLLM refuses it beside a "+rotary_embedding" of the user.
    plain = {}
    if device.type == "cpu":
        given = options.get("compilation_config")
        given = {"mode": given} if isinstance(given, int) else given or {}  # vLLM takes a number as the mode
        operators = list(dict.fromkeys([*given.get("custom_ops", ()), "-rotary_embedding"]))
        plain = {"compilation_config": {**given, "custom_ops": operators}}
    return {**options, **plain, "hf_overrides": {**widths, **options["hf_overrides"]}}


def zeros_of(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield zeros for each weight once, by its first name; they take no memory."""
    seen: set[int] = set()
    for name, parameter in parameters.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, torch.zeros(()).expand(parameter.shape)


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
