"""Functions on the weights of a vLLM worker, run by `collective_rpc`."""

from collections.abc import Iterable, Iterator
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
    slots = [slot.any() for module in modules for slot in tensors_of(vars(module).get("lora_a_stacked", ()))]
    return int(torch.stack(slots).sum()) if slots else 0


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


def divide_logits(worker: Any, temperature: float) -> None:
    """Let the model return its logits in fp32 and divided by `temperature`.

    vLLM takes raw log-probs from what the model returns, before penalties, min_p, top_k and top_p. So they are log-probs at this
    temperature over the whole vocabulary.
    """
    model = worker.get_model()
    compute = model.compute_logits

    def compute_divided(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        return None if logits is None else logits.float().div_(temperature)

    model.compute_logits = compute_divided


def has_head(worker: Any) -> bool:
    """Return whether the model has a head of its own, which may be tied to the embedding."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in worker.get_model().named_modules())


def reload(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load a complete set of weights as from a checkpoint. Raises ValueError if the model has others."""
    model = worker.get_model()
    missing = {name for name, _ in model.named_parameters()}
    load = model.load_weights

    def load_and_note(pairs: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        arrived = load(pairs)
        # If a model does not return the names it loaded, assume that it loaded all.
        missing.difference_update(missing if arrived is None else named_among(missing, arrived))
        return arrived

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    finally:
        del model.load_weights
    # Quantisation has parameters of its own, which no checkpoint holds.
    if missing and worker.vllm_config.model_config.quantization is None:
        some = ", ".join(sorted(missing)[:3])
        raise ValueError(f"{len(missing)} weights of vLLM's {type(model).__name__} did not arrive, among them {some}")


def named_among(parameters: Iterable[str], arrived: Iterable[str]) -> set[str]:
    """Return the parameters that a model reports as loaded.

    A module may report a parameter of a submodule as its own: vLLM 0.26 reports `experts.w2_weight` for
    `experts.routed_experts.w2_weight`.
    """
    parameters, arrived = set(parameters), set(arrived)
    named = parameters & arrived
    handed_on = [name.rpartition(".") for name in arrived - parameters]
    for module, _, leaf in handed_on:
        named.update(name for name in parameters if name.startswith(f"{module}.") and name.endswith(f".{leaf}"))
    return named


class Stream:
    """Weights on their way to vLLM; `has_failed` tells whether an error came from their source."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.has_failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from self._weights
        except Exception:
            self.has_failed = True
            raise
