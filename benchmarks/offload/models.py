"""Models with random weights, built from a named shape or a local Hugging Face configuration."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlx.offload.layer_costs import VOCABULARY, Case, build, config_of
from rlx.offload.plan.shapes import SHAPES
from rlx.offload.runtime.layers import find_layers
from rlx.offload.streaming.nf4 import quantize_layers


def read_shape(name: str) -> dict[str, Any]:
    """Return the configuration of a named shape, or of a local file or folder in Hugging Face format.

    Raises:
        ValueError: if the name is neither, or the file is not a configuration.
    """
    if name in SHAPES:
        return {**SHAPES[name], "vocab_size": VOCABULARY}
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model {name!r} is neither a named shape nor a local configuration; choose one of {', '.join(SHAPES)}, "
            "or give the path of a config.json or of its folder"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} is not the configuration of a model: it has no 'model_type'")
    return config


def number_of_layers(shape: dict[str, Any]) -> int:
    """Return the number of layers of the shape itself."""
    from transformers import AutoConfig

    return int(AutoConfig.for_model(**shape).num_hidden_layers)


def build_quantized(shape: dict[str, Any], case: Case, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the model of `build`, frozen and quantised to NF4; only one layer ever has full weights, and all start equal."""
    one = case._replace(layers=1)
    model = build(shape, one, device, dtype).requires_grad_(False)
    quantize_layers(model)
    ((name, layer),) = find_layers(model, None)
    parent = model.get_submodule(name.rpartition(".")[0])
    parent.extend(copy.deepcopy(layer) for _ in range(case.layers - 1))  # type: ignore[operator]
    of_one, of_all = vars(config_of(shape, one)), vars(config_of(shape, case))
    vars(model.config).update((key, value) for key, value in of_all.items() if value != of_one[key])
    return model


def share(model: nn.Module) -> nn.Module:
    """Return a second module tree on the same parameters and buffers, for another mode."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
