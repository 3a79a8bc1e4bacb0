"""Put LoRA adapters of peft into a model, merge them into its weights, and read and write folders in peft's format.

Note [how experts are adapted]: the weights of experts are tensors (experts, out, in), or (experts, in, out), instead of linear
layers. peft's `ParamWrapper` around a module of experts holds the adapters of one of its tensors; two tensors have two wrappers, one
in the other. In a forward the module sees the merged tensor, weight + scale * B A, and multiplies with its own kernel, grouped
products included. So all experts of a layer exist twice while it runs, and in backward their gradient a third time, as in full
training. peft's own forward swaps the module's class meanwhile, which sharding, offloading and streaming would meet halfway.
Shapes, as peft has them: A is (experts * rank, in), B is (out, rank * experts), with the experts last.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlx.config.schema import ModelConfig
from rlx.errors import did_you_mean
from rlx.models.hf_folder import as_open_as_folder
from rlx.models.loading import ModelError, explained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
ADAPTER_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""The parameters of an adapter, as peft names them; DoRA alone has the last."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Options of peft with which its layers compute something else than rlx's, and the values without effect.
_UNKNOWN = {
    "bias": ("none", None),
    # Others, such as pissa, olora and corda, also change the base weights, which the folder does not hold.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None, {}),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "alora_invocation_tokens": (None,),
}


class Adapter(NamedTuple):
    """How to merge one layer's adapter: weight += scale * B A, transposed if the layer stores (in, out).

    With DoRA each row (output) of the sum is then scaled to the length that the magnitude vector holds.
    """

    scale: float
    transposed: bool
    is_rank_stabilised: bool = False  # whether scale is alpha / sqrt(rank) instead of alpha / rank
    parameter: str = "weight"  # that it changes
    experts: int = 0  # of a weight (experts, out, in), see Note [how experts are adapted]; 0: a matrix


def adapter_dtype(weight: torch.dtype) -> torch.dtype:
    """Return the type of adapters on weights of this type: fp32, or fp64 if the weights have it."""
    return torch.promote_types(weight, torch.float32)


def add_lora(model: "PreTrainedModel", config: ModelConfig, seed: int = 0) -> dict[str, Adapter]:
    """Put adapters into the model's linear layers in place, and freeze everything else except a value head.

    The outputs stay the same at first, because each B starts at 0. An adapted layer `x` keeps its weight as `x.base_layer.weight`
    and gets `x.lora_A.default.weight` (rank, in) and `x.lora_B.default.weight` (out, rank); with DoRA also
    `x.lora_magnitude_vector.default.weight` (out). All that is trained has the type of `adapter_dtype`, because most updates of RL
    are too small for bf16. For experts see Note [how experts are adapted]. Fresh adapters of a `seed` are the same on every
    machine; the caller's random state is unchanged.

    Returns the adapted layers by name, for `merged_weights`. Raises ModelError if peft is missing, or a target does not exist, is
    neither linear nor experts, or is tied to another weight.

    Source: arXiv:2106.09685, section 4.1; DoRA: arXiv:2402.09353, equation 5; rsLoRA: arXiv:2312.03732.
    """
    head, targets = _value_head(model), adapter_targets(model, config.target_modules)
    experts, options = expert_targets(model, config.target_modules), config.lora
    if experts and options.use_dora:
        raise ModelError(
            f"lora.use_dora: got True with experts as targets ({experts[0]}), which have LoRA alone; set it to False"
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(f"lora_rank={config.lora_rank} needs peft ({error}); pip install 'peft>=0.17'") from None
    lora_config = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=[f"model.{name}" for name in targets],
        target_parameters=[f"model.{name}" for name in experts] or None,
        use_dora=options.use_dora,
        use_rslora=options.use_rslora,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")  # peft corrects it by itself for each layer
        torch.default_generator.manual_seed(seed)  # not those of GPUs, which fork_rng would not restore
        # peft takes dense layers of some mixtures of experts for experts. In a dictionary it does not know the model's type.
        inject_adapter_in_model(lora_config, nn.ModuleDict({"model": model}), ADAPTER)
    for name in head:
        module = model.get_submodule(name).requires_grad_(True)
        module.to(adapter_dtype(next(module.parameters()).dtype))
    layers = {name: cast(Any, model.get_submodule(name)) for name in targets}
    adapters = {
        n: Adapter(each.scaling[ADAPTER], each.fan_in_fan_out, options.use_rslora) for n, each in layers.items()
    }
    for name, layer in take_over(model).items():
        layers[name], base = layer, layer.get_base_layer()
        own = layer.parameter_name, len(getattr(base, layer.parameter_name))
        adapters[name] = Adapter(
            layer.scaling[ADAPTER], getattr(base, "is_transposed", False), options.use_rslora, *own
        )
    for name, layer in layers.items():
        for part in (getattr(layer, part) for part in ADAPTER_PARTS if hasattr(layer, part)):
            part.to(adapter_dtype(getattr(layer.get_base_layer(), adapters[name].parameter).dtype))
    return adapters


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the experts' weights with adapters by their names before `add_lora`, each with the module of its adapter."""
    for name, module in model.named_modules():
        if parameter := getattr(module, "parameter_name", None):
            yield f"{plain_name(name)}.{parameter}", module


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let adapted layers compute what they did before `add_lora`, bit for bit. No gradient may be computed meanwhile.

    peft's own switch changes `requires_grad`, which FSDP reads only once.
    """
    layers = [cast(Any, module) for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.forward = layer.get_base_layer().forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def require_called_adapters(model: nn.Module, run: Callable[[], object]) -> None:
    """Raise ModelError for adapters that the model does not call, because it reads their layer's weight itself, as Mamba does.

    `run` is a forward of the model as in training. The model may be sharded.
    """
    called: set[nn.Module] = set()
    inside = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
    adapted = [each for each in inside if hasattr(each[2], "lora_A")]
    parts = {part for parent, _, _ in adapted for part in parent.modules()}
    hooks = [part.register_forward_hook(lambda own, inputs, output: called.add(own)) for part in parts]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    # An expert without tokens is not called either, but then nor is anything around it. The module around a layer may have
    # methods instead of a forward, as Gemma 3n's AltUp, so its other parts show too that it ran.
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
    """Yield one by one the weights of a model without adapters that has the same outputs, by their names before `add_lora`.

    `parameters` are all of the adapted model's, or any part that includes the adapters of its layers; without `adapters` those are
    off. `gather` returns the full tensor of each, in the same order on every process. The product is added in at least fp32.
    """
    layers = {f"{plain_name(layer)}.{adapter.parameter}": layer for layer, adapter in adapters.items()}
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        plain, full = plain_name(name), gather(parameter)
        if (layer := layers.get(plain)) is not None:
            names = [f"{layer}.{part}.{ADAPTER}.weight" for part in ADAPTER_PARTS]
            parts = [gather(parameters[each]) for each in names if each in parameters]
            full = _merge(full, adapters[layer], *parts)
        yield plain, full


def adapter_weights(
    parameters: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the adapters, by their names in the adapted model; arguments as of `merged_weights`."""
    return ((name, gather(parameter)) for name, parameter in parameters.items() if is_adapter(name))


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model, by its name, is one of an adapter."""
    return name.endswith(f".{ADAPTER}.weight") and name.split(".")[-3] in ADAPTER_PARTS


def plain_name(name: str) -> str:
    """Return the name of a parameter or layer before `add_lora`."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _merge(weight: Tensor, adapter: Adapter, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> Tensor:
    wide, inputs = adapter_dtype(weight.dtype), 0 if adapter.transposed else 1
    if adapter.experts:
        left, right = expert_product(a.to(wide), b.to(wide), adapter.experts, adapter.transposed)
        return torch.baddbmm(weight.to(wide), left, right, alpha=adapter.scale).to(weight.dtype)
    product = b.to(wide) @ a.to(wide)
    whole = weight.to(wide) + adapter.scale * (product.T if adapter.transposed else product)
    if magnitude is not None:
        factor = magnitude.to(wide) / torch.linalg.vector_norm(whole, dim=inputs)
        whole *= factor.unsqueeze(inputs)
    return whole.to(weight.dtype)


def _value_head(model: "PreTrainedModel") -> list[str]:
    """Return the modules of a value model outside its backbone; none for a language model, whose head is not new."""
    children = model.named_children() if model.get_output_embeddings() is None else ()
    return [name for name, child in children if name != model.base_model_prefix and [*child.parameters()]]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map; a subclass with a forward of its own, such as Llama 4's router, is none."""
    from transformers.pytorch_utils import Conv1D

    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _named(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the names that a target means: those that end so."""
    return [name for name in names if name == wanted or name.endswith(f".{wanted}")]


def _experts_named(model: nn.Module, wanted: str) -> list[str]:
    """Return the weights of experts that a target means: its own name, or that of the module around it."""
    stacked = {}
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and len(parameter) == getattr(module, "num_experts", None):
                stacked[f"{owner}.{name}"] = owner
    if owners := _named(wanted, [name for name, _ in model.named_modules()]):
        return [name for name, owner in stacked.items() if owner in owners]
    return _named(wanted, stacked)


def expert_targets(model: nn.Module, text: str) -> list[str]:
    """Return the full names of the experts' weights (experts, out, in) that get adapters; arguments as of `adapter_targets`."""
    return list(dict.fromkeys(name for wanted in text.split(",") for name in _experts_named(model, wanted.strip())))


def adapter_targets(model: "PreTrainedModel", text: str) -> list[str]:
    """Return the full names of the modules that get adapters: those with the given name endings, joined by commas.

    `all-linear` is every linear layer with weights of its own, except the head. Names of experts' weights are left to
    `expert_targets`. The model may be on the meta device. Raises ModelError as `add_lora`.
    """
    head, output = _value_head(model), model.get_output_embeddings()
    modules = {name: cast(Any, module) for name, module in model.named_modules() if name}
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    found: dict[str, None] = {}
    for wanted in map(str.strip, text.split(",")):
        if wanted == "all-linear":
            linear = {n: m for n, m in modules.items() if is_linear(m) and m is not output and n not in head}
            matches = [name for name, module in linear.items() if uses[module.weight] == 1]
            if not matches:
                raise ModelError(
                    f"target_modules: got all-linear for a {type(model).__name__}, whose linear layers have a forward of their "
                    "own or share weights, expected at least one plain linear layer; set lora_rank=0 to train all weights"
                )
        elif _experts_named(model, wanted):
            continue
        elif not (matches := _named(wanted, modules)):
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


def expert_product(a: Tensor, b: Tensor, experts: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of the change of experts' weights, one product for each expert, from A (E r, in) and B (out, r E)."""
    a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    return (a.mT, b.mT) if transposed else (b, a)


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
    left, right = expert_product(a, b, len(weight), getattr(inner, "is_transposed", False))
    merged = torch.baddbmm(weight, left, right, alpha=self.scaling[name])
    return functional_call(self.base_layer, {f"{path}{self.parameter_name}": merged}, args, kwargs)


class AdapterKind(NamedTuple):
    """The options of adapters; `experts` are the names of experts' weights that have some."""

    rank: int
    alpha: float
    use_dora: bool
    use_rslora: bool
    experts: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: ModelConfig) -> "AdapterKind":
        return cls(config.lora_rank, config.lora_alpha, config.lora.use_dora, config.lora.use_rslora)


def write_adapters(folder: Path, weights: Mapping[str, Tensor], kind: AdapterKind, base: str | None = None) -> None:
    """Write a folder that peft and vLLM load, of full tensors as `adapter_weights` yields them.

    `base` is the folder or hub name of the model below them, for tools that load both.
    """
    from safetensors.torch import save_file

    write_config(folder, weights, kind, base)
    tensors = {peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    as_open_as_folder(folder / WEIGHTS)


def write_config(folder: Path, weights: Iterable[str], kind: AdapterKind, base: str | None = None) -> None:
    """Write the configuration of such a folder; arguments as of `write_adapters`."""
    owners = {name.rpartition(".")[0] for name in kind.experts}
    targets = sorted({layer for name in weights if plain_name(layer := name.rpartition(".lora_")[0]) not in owners})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": kind.rank,
        "lora_alpha": int(kind.alpha) if float(kind.alpha).is_integer() else kind.alpha,
        "use_dora": kind.use_dora,
        "use_rslora": kind.use_rslora,
        "target_modules": targets,
        "target_parameters": sorted(kind.experts) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def adapter_faults(path: str, config: ModelConfig) -> list[str]:
    """Return faults of a folder of adapters: its files, its kind, options of peft. `load_adapters` compares the layers."""
    folder, key = Path(path), "lora_adapter_path"
    lacking = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        return [f"{key}: {folder} has no {' and no '.join(lacking)}; expected a folder that peft or rlx.export wrote"]
    try:
        found = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return [f"{key}: {folder / CONFIG} cannot be read as JSON ({error})"]
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        return [f"{key}: {folder / CONFIG} is no configuration of LoRA, expected peft_type LORA"]
    faults = [
        f"{key}: {folder} was made with peft's {name}={found[name]!r}, which rlx does not have; expected {usual[0]!r}"
        for name, usual in _UNKNOWN.items()
        if name in found and found[name] not in usual
    ]
    wanted = {"r": ("lora_rank", config.lora_rank), "lora_alpha": ("lora_alpha", config.lora_alpha)}
    wanted |= {name: (f"lora.{name}", getattr(config.lora, name)) for name in ("use_dora", "use_rslora")}
    for name, (own, value) in wanted.items():
        theirs = found.get(name, False)
        if theirs != value:
            faults.append(
                f"{key}: the adapters of {folder} have {name}={theirs}, but {own}={value}; set {own}={theirs}"
            )
    return faults


def load_adapters(model: "PreTrainedModel", config: ModelConfig) -> None:
    """Copy the adapters of `config.lora_adapter_path` into a model after `add_lora`, before sharding.

    On the meta device this only checks names and shapes. Raises ModelError if there is no such folder, or its adapters are of
    another kind or for other layers.
    """
    assert config.lora_adapter_path is not None
    path = str(Path(config.lora_adapter_path).expanduser())
    if faults := adapter_faults(path, config):
        raise ModelError("; ".join(faults))
    from safetensors import safe_open

    own = {peft_name(name): parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    with explained(f"the adapters of {path}"):
        file: Any = safe_open(Path(path) / WEIGHTS, framework="pt")
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    _require_equal_experts(path, {name for name, _ in adapted_experts(model)})
    targets = ",".join(sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in theirs}))
    for what, names in (("lacks", own.keys() - theirs.keys()), ("has in excess", theirs.keys() - own.keys())):
        if names:
            raise ModelError(
                f"lora_adapter_path: {path} {what} {len(names)} parameters of adapters, such as {', '.join(sorted(names)[:3])}; "
                f"expected those of the layers in target_modules. Set target_modules={targets}, or take adapters of this model"
            )
    for name, parameter in own.items():
        if tuple(parameter.shape) != theirs[name]:
            raise ModelError(
                f"lora_adapter_path: {name} of {path} has shape {theirs[name]}, expected {tuple(parameter.shape)}; the "
                "adapters belong to another model"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            if not parameter.is_meta:
                parameter.copy_(file.get_tensor(name))


def _require_equal_experts(path: str, own: set[str]) -> None:
    """Compare the experts' weights by name endings in peft's configuration: its parameter names lack them."""
    theirs = json.loads((Path(path) / CONFIG).read_text()).get("target_parameters") or []
    pairs = {(name, end) for end in theirs for name in _named(end, own)}
    if ({name for name, _ in pairs}, {end for _, end in pairs}) != (own, set(theirs)):
        raise ModelError(
            f"lora_adapter_path: {path} has target_parameters={theirs}, but target_modules means the experts' weights "
            f"{sorted(own)[:3]}; name the same ones in target_modules"
        )


def peft_name(name: str) -> str:
    """Return peft's name in a file for a parameter of an adapted model: without the adapter's name."""
    layer, part = name.removesuffix(f".{ADAPTER}.weight").rsplit(".", 1)
    return f"{_PREFIX}{layer}.{part}" + (".weight" if part in ("lora_A", "lora_B") else "")
