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
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.func import functional_call

from rlx.models.lora import ADAPTER, expert_product


class AdaptedExperts(ParamWrapper):  # type: ignore[misc]  # peft has no types
    """A wrapper of peft whose forward merges as in Note [how experts are adapted]."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts with the merged tensor."""
        inner, path = self.base_layer, ""
        while isinstance(inner, ParamWrapper):
            inner, path = inner.base_layer, f"{path}base_layer."
        weight: Tensor = getattr(inner, self.parameter_name)
        a, b = (getattr(self, part)[ADAPTER].weight.to(weight.dtype) for part in ("lora_A", "lora_B"))
        left, right = expert_product(a, b, len(weight), is_transposed(inner))
        merged = torch.baddbmm(weight, left, right, alpha=self.scaling[ADAPTER])
        return functional_call(self.base_layer, {f"{path}{self.parameter_name}": merged}, args, kwargs)


def is_transposed(experts: nn.Module) -> bool:
    """Whether a module stores the weights of its experts as (experts, in, out)."""
    return bool(getattr(experts, "is_transposed", False))


def take_over(model: nn.Module) -> dict[str, AdaptedExperts]:
    """Give the wrappers of peft in a model the forward of this class; return them by name, the inner ones too."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, ParamWrapper)}
    for module in found.values():
        module.__class__ = AdaptedExperts
    return found
