"""LoRA adapters on the weights of experts: tensors (experts, out, in), or (experts, in, out), instead of linear layers.

Note [how experts are adapted]
peft's `ParamWrapper` around a module of experts holds the adapters of one of its tensors; two tensors have two wrappers, one in the
other. In a forward the module sees the merged tensor, weight + scale * B A, and multiplies with its own kernel, grouped products
included. So all experts of a layer exist twice while it runs, and in backward their gradient a third time, as in full training.
peft's own forward swaps the module's class meanwhile, which sharding, offloading and streaming would meet halfway.

Shapes, as peft has them: A is (experts * rank, in), B is (out, rank * experts), with the experts last.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def expert_product(a: Tensor, b: Tensor, experts: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of the change of experts' weights, one product for each expert, from A (E r, in) and B (out, r E)."""
    a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    return (a.mT, b.mT) if transposed else (b, a)


def is_transposed(experts: nn.Module) -> bool:
    """Whether a module stores the weights of its experts as (experts, in, out)."""
    return bool(getattr(experts, "is_transposed", False))


def take_over(model: nn.Module) -> dict[str, Any]:
    """Let the wrappers of peft in a model compute as in Note [how experts are adapted]; return them by name, the inner ones too."""
    from peft.tuners.lora import ParamWrapper

    merging = type("MergingWrapper", (ParamWrapper,), {"forward": _forward})
    found = {name: module for name, module in model.named_modules() if isinstance(module, ParamWrapper)}
    for module in found.values():
        module.__class__ = merging
    return found


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    inner, path = self.base_layer, ""
    while hasattr(inner, "parameter_name"):
        inner, path = inner.base_layer, f"{path}base_layer."
    weight, (name,) = getattr(inner, self.parameter_name), self.lora_A
    a, b = (part[name].weight.to(weight.dtype) for part in (self.lora_A, self.lora_B))
    left, right = expert_product(a, b, len(weight), is_transposed(inner))
    merged = torch.baddbmm(weight, left, right, alpha=self.scaling[name])
    return functional_call(self.base_layer, {f"{path}{self.parameter_name}": merged}, args, kwargs)
