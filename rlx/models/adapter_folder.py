"""Read and write folders of LoRA adapters in peft's format: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlx.config.schema import ModelConfig
from rlx.models.hf_folder import as_open_as_folder
from rlx.models.loading import ModelError, explained
from rlx.models.lora import ADAPTER, ADAPTER_PARTS, adapted_experts, plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


class AdapterKind(NamedTuple):
    """What the parameters of an adapter mean; `experts` are the names of experts' weights with adapters."""

    rank: int
    alpha: float
    use_dora: bool
    use_rslora: bool
    experts: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: ModelConfig) -> "AdapterKind":
        """Return the configured kind."""
        return cls(config.lora_rank, config.lora_alpha, config.lora.use_dora, config.lora.use_rslora)


def write_adapters(folder: Path, weights: Mapping[str, Tensor], kind: AdapterKind, base: str | None = None) -> None:
    """Write a folder that peft's `PeftModel.from_pretrained` and vLLM load.

    Args:
        folder: exists.
        weights: full tensors by their names in the adapted model, as `rlx.models.lora.adapter_weights` yields them.
        kind: of the adapters.
        base: folder or hub name of the model below them, for tools that load both.
    """
    from safetensors.torch import save_file

    write_config(folder, weights, kind, base)
    tensors = {peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    as_open_as_folder(folder / WEIGHTS)


def write_config(folder: Path, weights: Iterable[str], kind: AdapterKind, base: str | None = None) -> None:
    """Write the file of such a folder that describes its adapters; arguments as of `write_adapters`."""
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
    """Return why a folder of adapters cannot be the start of a configured model: its files, its kind, options of peft.

    Whether its tensors fit the model's layers is checked by `load_adapters`.
    """
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
    """Copy the adapters of `config.lora_adapter_path` into a model after `add_lora`.

    Args:
        model: adapted, not yet sharded; may be on the meta device, which only checks names and shapes.
        config: reads lora_adapter_path and the kind of the adapters.

    Raises:
        ModelError: there is no such folder, or its adapters are of another kind or for other layers.
    """
    path = config.lora_adapter_path
    assert path is not None
    if faults := adapter_faults(path, config):
        raise ModelError("; ".join(faults))
    from safetensors import safe_open

    own = {peft_name(name): parameter for name, parameter in model.named_parameters() if _is_part(name)}
    with explained(f"the adapters of {path}"):
        file: Any = safe_open(Path(path) / WEIGHTS, framework="pt")
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    _require_equal_experts(path, {name for name, _ in adapted_experts(model)})
    _require_equal_layers(path, own, theirs)
    with torch.no_grad():
        for name, parameter in own.items():
            if not parameter.is_meta:
                parameter.copy_(file.get_tensor(name))


def _require_equal_experts(path: str, own: set[str]) -> None:
    """peft's names of parameters do not tell which weight of an expert they change; its configuration does, by ends of names."""
    theirs = json.loads((Path(path) / CONFIG).read_text()).get("target_parameters") or []
    pairs = {(name, end) for name in own for end in theirs if name == end or name.endswith(f".{end}")}
    if ({name for name, _ in pairs}, {end for _, end in pairs}) != (own, set(theirs)):
        raise ModelError(
            f"lora_adapter_path: {path} has target_parameters={theirs}, but target_modules means the experts' weights "
            f"{sorted(own)[:3]}; name the same ones in target_modules"
        )


def _require_equal_layers(path: str, own: Mapping[str, nn.Parameter], theirs: Mapping[str, tuple[int, ...]]) -> None:
    for what, names in (("lacks", own.keys() - theirs.keys()), ("has in excess", theirs.keys() - own.keys())):
        if names:
            some = ", ".join(sorted(names)[:3])
            targets = ",".join(sorted({_leaf(name) for name in theirs}))
            raise ModelError(
                f"lora_adapter_path: {path} {what} {len(names)} parameters of adapters, such as {some}; expected those of the "
                f"layers in target_modules. Set target_modules={targets}, or take adapters of this model"
            )
    for name, parameter in own.items():
        if tuple(parameter.shape) != theirs[name]:
            raise ModelError(
                f"lora_adapter_path: {name} of {path} has shape {theirs[name]}, expected {tuple(parameter.shape)}; the "
                "adapters belong to another model"
            )


def _is_part(name: str) -> bool:
    return name.endswith(f".{ADAPTER}.weight") and name.split(".")[-3] in ADAPTER_PARTS


def peft_name(name: str) -> str:
    """Return peft's name in a file for a parameter of an adapted model: without the adapter's name."""
    layer, part = name.removesuffix(f".{ADAPTER}.weight").rsplit(".", 1)
    return f"{_PREFIX}{layer}.{part}" + (".weight" if part in ("lora_A", "lora_B") else "")


def _leaf(name: str) -> str:
    return name.rpartition(".lora_")[0].rpartition(".")[2]
