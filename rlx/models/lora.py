"""Put LoRA adapters of peft into a model, and merge adapters into the model's weights."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlx.config.schema import ModelConfig
from rlx.errors import did_you_mean
from rlx.models.loading import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
ADAPTER_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""The parameters of an adapter, as peft names them; DoRA alone has the last."""


class Adapter(NamedTuple):
    """How to merge one layer's adapter: weight += scale * B A, transposed if the layer stores (in, out).

    With DoRA each row (output) of the sum is then scaled to the length that the magnitude vector holds.
    """

    scale: float
    transposed: bool
    is_rank_stabilised: bool = False  # whether scale is alpha / sqrt(rank) instead of alpha / rank


def adapter_dtype(weight: torch.dtype) -> torch.dtype:
    """Return the type of the adapters of weights of this type: fp32, or fp64 if the weights have it."""
    return torch.promote_types(weight, torch.float32)


def add_lora(model: "PreTrainedModel", config: ModelConfig, seed: int = 0) -> dict[str, Adapter]:
    """Put adapters into the model's linear layers in place, and freeze everything else except a value head.

    The model's outputs stay the same at first, because each B starts at 0. An adapted layer `x` keeps its own weight as
    `x.base_layer.weight` and gets `x.lora_A.default.weight` (rank, in) and `x.lora_B.default.weight` (out, rank); with DoRA
    also `x.lora_magnitude_vector.default.weight` (out). Everything that is trained has the type of `adapter_dtype`, because
    most updates of RL are too small for bf16. In a forward the caller may cast it to the type of the weights.

    Args:
        model: a transformers model that is not yet sharded.
        config: reads lora_rank, lora_alpha, target_modules, lora. `all-linear` is every linear layer except the head.
        seed: of the fresh adapters, which are then the same on every machine. The caller's random state is unchanged.

    Returns:
        The adapted layers by name, for `merged_weights`.

    Raises:
        ModelError: peft is missing, the rank is 0, or a target does not exist, is not linear, or is tied to another weight.

    Source: arXiv:2106.09685, section 4.1; DoRA: arXiv:2402.09353, equation 5; rsLoRA: arXiv:2312.03732.
    """
    if config.lora_rank < 1:
        raise ModelError(f"lora_rank: got {config.lora_rank}, expected at least 1 to add adapters")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(f"lora_rank={config.lora_rank} needs peft ({error}); pip install 'peft>=0.17'") from None

    head, targets = _value_head(model), adapter_targets(model, config.target_modules)
    # peft takes the dense layers of some mixtures of experts for experts. In a dictionary it does not know the model's type.
    hidden = nn.ModuleDict({"model": model})
    own_names = [f"model.{name}" for name in targets]
    lora_config = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=own_names,
        use_dora=config.lora.use_dora,
        use_rslora=config.lora.use_rslora,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")  # peft corrects it by itself for each layer
        torch.default_generator.manual_seed(seed)  # not those of GPUs, which fork_rng would not restore
        inject_adapter_in_model(lora_config, hidden, ADAPTER)
    for name in head:
        module = model.get_submodule(name).requires_grad_(True)
        module.to(adapter_dtype(next(module.parameters()).dtype))
    layers = {name: cast(Any, model.get_submodule(name)) for name in targets}
    for layer in layers.values():
        for part in (getattr(layer, part) for part in ADAPTER_PARTS if hasattr(layer, part)):
            part.to(adapter_dtype(layer.get_base_layer().weight.dtype))
    is_stabilised = config.lora.use_rslora
    return {
        name: Adapter(layer.scaling[ADAPTER], layer.fan_in_fan_out, is_stabilised) for name, layer in layers.items()
    }


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Return a context in which adapted layers compute what they did before `add_lora`, bit for bit.

    No gradient may be computed meanwhile. peft's own switch changes `requires_grad`, which FSDP reads only once.
    """
    layers = [cast(Any, module) for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.forward = layer.get_base_layer().forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def refuse_idle_adapters(model: nn.Module, run: Callable[[], object]) -> None:
    """Refuse adapters that the model does not call, because it reads their layer's weight itself, as Mamba does.

    Args:
        model: with adapters; may be sharded.
        run: a forward of the model as in training.

    Raises:
        ModelError: the layer around an adapter runs without calling it.
    """
    called: set[nn.Module] = set()
    inside = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    adapted = [(parent, name, child) for parent, name, child in inside if hasattr(child, "lora_A")]
    hooks = [
        module.register_forward_hook(lambda own, inputs, output: called.add(own))
        for module in {part for parent, _, _ in adapted for part in parent.modules()}
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    # An expert without tokens is not called either, but then nor is anything around it. The module around a layer may have
    # methods instead of a forward, as Gemma 3n's AltUp, so its other parts tell as well that it ran.
    idle = {name for parent, name, child in adapted if child not in called and not called.isdisjoint(parent.modules())}
    if idle:
        used = sorted(name for name in {n for _, n, child in adapted if child in called} - idle if not name.isdigit())
        raise ModelError(
            f"lora_rank: {type(model).__name__.removeprefix('FSDP')} reads the weights of {', '.join(sorted(idle))} without "
            f"calling these modules, so their adapters would stay 0; set target_modules={','.join(used)}"
        )


def merged_weights(
    parameters: Mapping[str, Tensor],
    adapters: Mapping[str, Adapter],
    gather: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield one by one the weights of a model without adapters that has the same outputs.

    Args:
        parameters: by their names in the adapted model: all of them, or any part that includes the adapters of its layers.
        adapters: the result of `add_lora`.
        gather: returns the full tensor of a parameter, for example from its shards. It is called once for each parameter, in
            the same order on every process.

    Yields:
        The name as in the model before `add_lora`, and the full tensor in the dtype of the parameter. The adapter's product
        is computed and added in at least fp32.
    """
    for name, parameter in parameters.items():
        if _part_of(name, adapters):
            continue
        layer, base, leaf = name.rpartition(".base_layer.")
        full = gather(parameter)
        if base and leaf == "weight":
            names = [_name(layer, part) for part in ADAPTER_PARTS]
            parts = [gather(parameters[each]) for each in names if each in parameters]
            full = _merge(full, adapters[layer], *parts)
        yield (f"{layer}.{leaf}" if base else name), full


def base_weights(
    parameters: Mapping[str, Tensor],
    adapters: Mapping[str, Adapter],
    gather: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model as it is with adapters off, by their names before `add_lora`; arguments as above."""
    for name, parameter in parameters.items():
        if not _part_of(name, adapters):
            layer, base, leaf = name.rpartition(".base_layer.")
            yield (f"{layer}.{leaf}" if base else name), gather(parameter)


def adapter_weights(
    parameters: Mapping[str, Tensor],
    adapters: Mapping[str, Adapter],
    gather: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the adapters, by their names in the adapted model; arguments as of `merged_weights`."""
    for name, parameter in parameters.items():
        if _part_of(name, adapters):
            yield name, gather(parameter)


def _name(layer: str, part: str) -> str:
    return f"{layer}.{part}.{ADAPTER}.weight"


def _part_of(name: str, adapters: Mapping[str, Adapter]) -> bool:
    """Whether a parameter belongs to an adapter."""
    layer, _, end = name.removesuffix(f".{ADAPTER}.weight").rpartition(".")
    return end in ADAPTER_PARTS and layer in adapters


def _merge(weight: Tensor, adapter: Adapter, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> Tensor:
    wide, inputs = adapter_dtype(weight.dtype), 0 if adapter.transposed else 1
    product = b.to(wide) @ a.to(wide)
    whole = weight.to(wide) + adapter.scale * (product.T if adapter.transposed else product)
    if magnitude is not None:
        factor = magnitude.to(wide) / torch.linalg.vector_norm(whole, dim=inputs)
        whole *= factor.unsqueeze(inputs)
    return whole.to(weight.dtype)


def _value_head(model: "PreTrainedModel") -> list[str]:
    """Return the modules of a value model outside its backbone; none for a language model, whose head is not new."""
    if model.get_output_embeddings() is not None:
        return []
    outside = ((name, module) for name, module in model.named_children() if name != model.base_model_prefix)
    return [name for name, module in outside if any(True for _ in module.parameters())]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map; a subclass with a forward of its own, such as Llama 4's router, is none."""
    from transformers.pytorch_utils import Conv1D

    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _refuse_experts(model: nn.Module, wanted: str, matches: list[str]) -> None:
    """Refuse a target that means the weights of experts, which are not linear layers but tensors (experts, out, in)."""
    stacked = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    named = [name for name in stacked if name == wanted or name.endswith(f".{wanted}")]
    inside = [name for name in stacked if name.rpartition(".")[0] in matches]
    if found := named if not matches else inside:
        raise ModelError(
            f"target_modules: {wanted} means weights of experts, such as {found[0]}, which get no adapters in rlx; expected linear "
            "layers: leave it out, or train all weights (lora_rank=0)"
        )


def adapter_targets(model: "PreTrainedModel", text: str) -> list[str]:
    """Return the full names of the modules that get adapters: all linear ones with weights of their own, or those with the
    given name endings.

    The model may be on the meta device; the text is `all-linear` or names joined by commas. Raises ModelError as `add_lora`.
    """
    head = _value_head(model)
    modules = {name: module for name, module in model.named_modules() if name}
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    if text == "all-linear":
        output = model.get_output_embeddings()
        linear = {name: m for name, m in modules.items() if is_linear(m) and m is not output and name not in head}
        if own := [name for name, module in linear.items() if uses[module.weight] == 1]:
            return own
        raise ModelError(
            f"target_modules: got all-linear for a {type(model).__name__}, whose linear layers have a forward of their own or "
            "share weights, expected at least one plain linear layer; set lora_rank=0 to train all weights"
        )
    found: dict[str, None] = {}
    for wanted in (name.strip() for name in text.split(",")):
        matches = [name for name in modules if name == wanted or name.endswith(f".{wanted}")]
        _refuse_experts(model, wanted, matches)
        if not matches:
            names = {name.rpartition(".")[2] for name in modules}
            hint = did_you_mean(wanted, names, "expected `all-linear` or names joined by commas", most=3)
            raise ModelError(f"target_modules: the model has no module {wanted!r}; {hint}")
        found.update(dict.fromkeys(matches))
    for name in found:
        if not is_linear(modules[name]):
            raise ModelError(f"target_modules: {name} is no linear layer but {type(modules[name]).__name__}")
        if name in head:
            raise ModelError(f"target_modules: {name} is the value head, which is trained as a whole; leave it out")
        if uses[modules[name].weight] > 1:
            raise ModelError(
                f"target_modules: {name} shares its weight with another module; an adapter would make them differ"
            )
    return list(found)
