"""The folder of one role's checkpoint: its description, what goes into it, and how an engine continues from it.

<folder>/manifest.json      sizes and digests of all files, written last (rlx/checkpoint/manifest.py)
<folder>/checkpoint.json    description: head, counters, contents
<folder>/card/              config, generation config and tokenizer of the model
<folder>/model/             full tensors by name, in safetensors files, one of each process; the same for FSDP1 and FSDP2
<folder>/optimizer/         AdamW's state in the same form, if the optimizer has stepped
<folder>/hf_model/          a folder for from_pretrained, if asked for
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW

from rlx.checkpoint.loading import load, load_all
from rlx.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    FileEntry,
    OtherVersionError,
    damage,
    damaged_chunks,
    few,
    read_json,
    require_keys,
)
from rlx.engine.sharded import Sharded
from rlx.errors import storing
from rlx.models.adapter_folder import AdapterKind
from rlx.models.hf_folder import FolderParts
from rlx.models.lora import ADAPTER, Adapter, adapter_weights, merged_weights, plain_name
from rlx.offload.streaming.nf4 import in_full
from rlx.step_folders import steps_in

WRAPPED = "_fsdp_wrapped_module."  # what FSDP1 adds to names
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """checkpoint.json.

    Attributes:
        head: `lm` or `value`.
        contents: the parts that were saved.
        updates: optimizer steps asked for, including skipped ones; the learning rate follows them.
        steps: optimizer steps taken.
        adapters: LoRA layers in `model`, as `rlx.models.lora.add_lora` names them.
        quantization: of the frozen weights in `model`, as `model.quantization` names it.
        format: version of this layout.
    """

    head: str
    contents: tuple[str, ...]
    updates: int
    steps: int
    adapters: dict[str, Adapter]
    quantization: str | None = None
    format: int = FORMAT


def parts_of(description: Description, sharded: Sharded, optimizer: AdamW | None) -> dict[str, dict[str, Tensor]]:
    """Return the sharded state to save, by the name of its folder; all processes join. The storages are the engine's own."""
    parts: dict[str, dict[str, Tensor]] = {}
    if "model" in description.contents:
        parts["model"] = _tensors(get_model_state_dict(sharded.root, options=sharded.state_options))
    # Asking an optimizer for its state before its first step makes it take an empty step.
    if "optimizer" in description.contents and optimizer is not None and description.steps:
        parts["optimizer"] = _tensors(_optimizer_state(sharded, optimizer))
    return parts


def _optimizer_state(sharded: Sharded, optimizer: AdamW) -> dict[str, Any]:
    return get_optimizer_state_dict(sharded.root, optimizer, options=_flat(sharded))


def _flat(sharded: Sharded) -> Any:
    return replace(sharded.state_options, flatten_optimizer_state_dict=True)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Leave out numbers such as learning rates, which come from the configuration; torchao's are tensors."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if not name.startswith("param_groups.")}


def write_extra_files(
    partial: Path,
    description: Description,
    folder_parts: FolderParts,
    weights: dict[str, Tensor],
    trust_remote_code: bool,
) -> dict[str, FileEntry]:
    """Write all but the sharded state: description, parts of the model's folder and, if there are full weights, hf_model.

    Returns:
        No entries, because these files are read for their digests.

    Raises:
        StorageError: the system refused to write.
    """
    with storing(partial):
        (partial / "checkpoint.json").write_text(json.dumps(asdict(description), indent=2) + "\n")
        folder_parts.write(partial / "card")
        if weights:
            folder_parts.write_with_weights(partial / "hf_model", weights, trust_remote_code)
    return {}


def read_description(folder: Path) -> Description:
    """Return the description of one role's checkpoint.

    Raises:
        OtherVersionError: another version of rlx wrote it.
        CheckpointError: the folder is no checkpoint.
    """
    path = folder / "checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no checkpoint.json; expected a finished checkpoint of one role, such as .../global_step_N/actor"
        )
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise OtherVersionError(
            f"{path}: was written by another version of rlx: got format {str(found.get('format'))[:40]}, this version reads {FORMAT}"
        )
    require_keys(path, found, [each.name for each in fields(Description)])
    try:
        adapters = {layer: Adapter(*values) for layer, values in found["adapters"].items()}
        return Description(**{**found, "contents": tuple(found["contents"]), "adapters": adapters})
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no description that rlx wrote ({error})") from None


def read(
    folder: Path,
    head: str,
    sharded: Sharded,
    optimizer: AdamW | None,
    adapters: Mapping[str, Adapter],
    in_parts: Callable[[Callable[[], None]], None] = lambda make: make(),
) -> Description:
    """Replace model and optimizer by those of a checkpoint; all processes join.

    Any number of processes and either kind of FSDP may have written it. If it lacks the optimizer's state or the position in the
    schedule, these start anew, with a warning. The digests of the tensors are not checked, see `require_undamaged`.

    Args:
        folder, head, sharded, optimizer, adapters: the checkpoint, and what continues from it.
        in_parts: calls its argument, once or for some of the optimizer's parameters at a time, to make their state.

    Returns:
        The description, with the counters from which to continue.

    Raises:
        CheckpointError: it is no checkpoint, has no model, its model has another head, or its tensors do not fit.
    """
    description = read_description(folder)
    if description.head != head or "model" not in description.contents:
        raise CheckpointError(
            f"{folder}: got head {description.head} and contents {list(description.contents)}, expected head {head} and a "
            "model among the contents; to resume, save with checkpoint.save_contents=[model,optimizer,extra]"
        )
    _require_same_scale(folder, description.adapters, adapters)
    model = get_model_state_dict(sharded.root, options=sharded.state_options)
    load(_tensors(model), folder / "model")
    set_model_state_dict(sharded.root, model, options=sharded.state_options)
    if optimizer is not None:
        optimizer.state.clear()
        saved = folder / "optimizer"
        in_parts(lambda: _read_optimizer(saved, sharded, optimizer) if saved.is_dir() else None)
        if not saved.is_dir() and description.steps:
            logger.warning("%s holds no optimizer state: AdamW's moments start anew", folder)
            description = replace(description, steps=0)
        if "extra" not in description.contents and description.updates:
            logger.warning("%s holds no extra: the learning rate's schedule starts anew", folder)
            description = replace(description, updates=0)
    return description


def _require_same_scale(folder: Path, saved: Mapping[str, Adapter], own: Mapping[str, Adapter]) -> None:
    """Refuse adapters that would count more or less than they did when they were trained; their tensors would fit."""
    for layer in saved.keys() & own.keys():
        if not math.isclose(saved[layer].scale, own[layer].scale):
            raise CheckpointError(
                f"{folder}: got adapters that are scaled by {saved[layer].scale:g}, expected {own[layer].scale:g} as configured; set "
                "model.lora_alpha and model.lora.use_rslora as in the run that saved them"
            )


def _read_optimizer(folder: Path, sharded: Sharded, optimizer: AdamW) -> None:
    """Make the state of the parameters that the optimizer has now; all processes join."""
    state = _optimizer_state(sharded, optimizer)
    try:
        lacking = load(_tensors(state), folder, of_optimizer=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Continue with optim.optimizer, optim.master_weights and fsdp_config.model_dtype of the run that saved it, or "
            "save without the optimizer to begin with new moments"
        ) from None
    set_optimizer_state_dict(sharded.root, optimizer, state, options=_flat(sharded))
    for name, parameter in sharded.root.named_parameters():
        if f"state.{name.replace(WRAPPED, '')}" in lacking:  # it never had a gradient, so it has no state yet
            optimizer.state.pop(parameter, None)


def require_undamaged(folder: Path) -> None:
    """Check all files of a checkpoint against its manifest in this process.

    Raises:
        CheckpointError: a file is damaged, missing or not in the manifest; the message names it and another checkpoint of the run.
    """
    if faults := damage(folder) or damaged_chunks(folder):
        step, role = folder.absolute().parent, folder.name
        others = [
            each for each in steps_in(step.parent).values() if each != step and (each / role / MANIFEST).is_file()
        ]
        remedy = f"take another one, such as {others[-1]}" if others else "take a copy of it, or another checkpoint"
        raise CheckpointError(f"{few(faults)}; {remedy}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint on the CPU with adapters merged; works in a single process without process group.

    Raises:
        CheckpointError: the checkpoint is damaged or holds no model.
    """
    weights, description = _model(folder)
    if description.quantization is None:
        return dict(merged_weights(weights, description.adapters))
    own = (tensor.dtype for name, tensor in weights.items() if ".lora_" not in name and tensor.is_floating_point())
    dtype = next(own)  # embedding and norms are not quantised
    return dict(merged_weights(weights, description.adapters, lambda tensor: in_full(tensor, dtype)))


def read_adapters(folder: Path) -> tuple[dict[str, Tensor], AdapterKind]:
    """Return the adapters of a checkpoint as `read_weights` does its weights, and their kind.

    Raises:
        CheckpointError: the checkpoint is damaged, has no adapters, or has a value head that was trained beside them.
    """
    weights, description = _model(folder)
    if not description.adapters or description.head != "lm":
        got = "no adapters" if not description.adapters else f"a {description.head} head that was trained beside them"
        raise CheckpointError(f"{folder}: got {got}, expected a policy with adapters; export the merged model")
    found = dict(adapter_weights(weights, description.adapters))
    layer, adapter = next(iter(description.adapters.items()))
    rank = len(found[f"{layer}.lora_A.{ADAPTER}.weight"]) // max(1, adapter.experts)
    alpha = adapter.scale * (rank**0.5 if adapter.is_rank_stabilised else rank)
    experts = (f"{plain_name(name)}.{each.parameter}" for name, each in description.adapters.items() if each.experts)
    has_dora = any("magnitude" in name for name in found)
    return found, AdapterKind(rank, round(alpha, 6), has_dora, adapter.is_rank_stabilised, tuple(experts))


def _model(folder: Path) -> tuple[dict[str, Tensor], Description]:
    description = read_description(folder)
    if "model" not in description.contents:
        raise CheckpointError(f"{folder}: got contents {list(description.contents)}, expected model among them")
    require_undamaged(folder)
    return load_all(folder / "model"), description
