"""Models of which only adapters are trained, for `--frozen`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from rlx.offload.benchmark.modes import NotInstalledError
from rlx.offload.runtime.layers import find_layers

ADAPTER_RANK = 16


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and give each linear map of its layers a LoRA adapter of peft, in the type of the model."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise NotInstalledError(f"--frozen trains adapters of peft, which cannot be imported: {error}") from None
    layers = find_layers(model, None)
    targets = [f"{name}.{path}" for name, layer in layers for path in _linear_maps(layer)]
    model.requires_grad_(False)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # peft makes fp32 beside a quantised weight
    return model.train()


def with_adapters(rank: int = ADAPTER_RANK) -> Callable[[nn.Module], nn.Module]:
    """Return the function that makes each mode's model trainable."""
    return functools.partial(add_adapters, rank=rank)


def _linear_maps(layer: nn.Module) -> list[str]:
    return [path for path, module in layer.named_modules() if isinstance(module, nn.Linear)]
