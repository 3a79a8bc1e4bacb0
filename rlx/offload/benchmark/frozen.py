"""Models of which only adapters are trained, for `--frozen`."""

from __future__ import annotations

from torch import nn

from rlx.offload.benchmark.modes import NotInstalledError
from rlx.offload.runtime.layers import find_layers

ADAPTER_RANK = 16


def add_adapters(model: nn.Module) -> nn.Module:
    """Freeze a model and give each linear map of its layers a LoRA adapter of peft, in the type of the model."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise NotInstalledError(f"--frozen trains adapters of peft, which cannot be imported: {error}") from None
    inside = ((f"{name}.{path}", m) for name, layer in find_layers(model, None) for path, m in layer.named_modules())
    targets = [path for path, module in inside if isinstance(module, nn.Linear)]
    model.requires_grad_(False)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    inject_adapter_in_model(LoraConfig(r=ADAPTER_RANK, lora_alpha=2 * ADAPTER_RANK, target_modules=targets), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # peft makes fp32 beside a quantised weight
    return model.train()
