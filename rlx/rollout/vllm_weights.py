"""Functions on the weights of a vLLM worker, run by `collective_rpc`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlx.rollout.change_check import sample_of


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value that is a tensor or a collection."""
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [member for member in members if isinstance(member, Tensor)]


def _slots(model: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model that hold adapters: A and B of each part of a fused layer."""
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            yield from tensors_of(vars(module).get(name, ()))


def count_adapters(worker: Any) -> int:
    """Return the number of layers with an adapter; in an adapter A is never 0."""
    modules = worker.get_model().modules()
    return sum(bool(slot.any()) for module in modules for slot in tensors_of(vars(module).get("lora_a_stacked", ())))


def probe(worker: Any) -> Tensor:
    """Return a sample of the adapters if the model takes them, else of the weights; empty if vLLM has hidden some of these.

    On CPU it packs the weights of linear layers into memory of its own and leaves empty parameters.
    """
    model = worker.get_model()
    weights = list(_slots(model)) or list(model.parameters())
    return sample_of(weights if all(weight.numel() for weight in weights) else [])


def rounded_parameters(worker: Any) -> list[str]:
    """Return the parameters that the model keeps in fewer bits than it computes in, such as Apertus' scalars in bf16."""
    config = worker.vllm_config.model_config
    if config.quantization is not None:
        return []
    bits = torch.finfo(config.dtype).bits
    each = worker.get_model().named_parameters()
    return [name for name, p in each if p.is_floating_point() and torch.finfo(p.dtype).bits < bits]
