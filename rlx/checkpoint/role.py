"""The files of one role's checkpoint: what they are, and how one process reads its weights.

<folder>/manifest.json      sizes and digests of all files, written last (rlx/checkpoint/manifest.py)
<folder>/checkpoint.json    description: head, counters, contents
<folder>/card/              config, generation config and tokenizer of the model
<folder>/model/             full tensors by name, in safetensors files, one of each process; the same for FSDP1 and FSDP2
<folder>/optimizer/         AdamW's state in the same form, if the optimizer has stepped
<folder>/hf_model/          a folder for from_pretrained, if asked for
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torch import Tensor

from rlx.checkpoint import manifest
from rlx.checkpoint.manifest import FORMAT, MANIFEST, CheckpointError, FileEntry, OtherVersionError
from rlx.checkpoint.tensors import load_all
from rlx.errors import storing
from rlx.models.hf_folder import FolderParts
from rlx.models.lora import ADAPTER, Adapter, AdapterKind, adapter_weights, merged_weights, plain_name
from rlx.offload.streaming.nf4 import in_full
from rlx.step_folders import steps_in


@dataclass(frozen=True)
class Description:
    """checkpoint.json."""

    head: str  # `lm` or `value`
    contents: tuple[str, ...]  # the parts that were saved
    updates: int  # optimizer steps asked for, including skipped ones; the learning rate follows them
    steps: int  # optimizer steps taken
    adapters: dict[str, Adapter]  # LoRA layers in `model`, as `rlx.models.lora.add_lora` names them
    quantization: str | None = None  # of the frozen weights in `model`, as `model.quantization` names it
    base: str | None = None  # folder or hub name of the model at the start; None in checkpoints before 2026-11-27
    format: int = FORMAT  # version of this layout


def write_extra_files(
    partial: Path, description: Description, folder_parts: FolderParts, weights: dict[str, Tensor]
) -> dict[str, FileEntry]:
    """Write all but the sharded state: description, parts of the model's folder and, if there are full weights, hf_model.

    Returns no entries, because these files are read for their digests.
    """
    with storing(partial):
        (partial / "checkpoint.json").write_text(json.dumps(asdict(description), indent=2) + "\n")
        folder_parts.write(partial / "card")
        if weights:
            dtype = folder_parts.narrower(next(iter(weights.values())).dtype)
            folder_parts.write_with_weights(partial / "hf_model", weights, dtype)
    return {}


def read_description(folder: Path) -> Description:
    """Return the description of one role's checkpoint. Raises OtherVersionError or CheckpointError if it is none of this version."""
    path = folder / "checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no checkpoint.json; expected a finished checkpoint of one role, such as .../global_step_N/actor"
        )
    found = manifest.read_json(path)
    if found.get("format") != FORMAT:
        raise OtherVersionError(
            f"{path}: was written by another version of rlx: got format {str(found.get('format'))[:40]}, this version reads {FORMAT}"
        )
    found = {"base": None, **found}
    manifest.require_keys(path, found, [each.name for each in fields(Description)])
    try:
        adapters = {layer: Adapter(*values) for layer, values in found["adapters"].items()}
        right = {
            "head": found["head"] in ("lm", "value", "score"),
            "contents": isinstance(found["contents"], list)
            and {"model", "optimizer", "extra", "hf_model"}.issuperset(found["contents"]),
            "steps": manifest.is_count(found["steps"]),
            "updates": manifest.is_count(found["updates"]) and (found["steps"] in range(found["updates"] + 1)),
            "adapters": all(
                [*map(type, kind)] == [bool, bool, str, int] and math.isfinite(scale) and kind[-1] >= 0
                for scale, *kind in adapters.values()
            ),
            **{name: isinstance(found[name], str | None) for name in ("quantization", "base")},
        }
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no description that rlx wrote ({error})") from None
    if wrong := [f"{name}={found[name]!r:.60}" for name, is_right in right.items() if not is_right]:
        raise CheckpointError(f"{path}: is no description that rlx wrote: got {', '.join(wrong)}")
    return Description(**{**found, "contents": tuple(found["contents"]), "adapters": adapters})


def require_undamaged(folder: Path) -> None:
    """Check all files of a checkpoint against its manifest in this process. Raises CheckpointError, which names another checkpoint."""
    if faults := manifest.damage(folder) or manifest.damaged_chunks(folder):
        step, role = folder.absolute().parent, folder.name
        saved = [each for each in steps_in(step.parent).values() if (each / role / MANIFEST).is_file()]
        others = [each for each in saved if each != step]
        remedy = f"take another one, such as {others[-1]}" if others else "take a copy of it, or another checkpoint"
        raise CheckpointError(f"{manifest.few(faults)}; {remedy}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint on the CPU with adapters merged; works in a single process without process group."""
    weights, description = _model(folder)
    with _belonging_together(folder):
        if description.quantization is None:
            return dict(merged_weights(weights, description.adapters))
        own = (tensor.dtype for name, tensor in weights.items() if ".lora_" not in name and tensor.is_floating_point())
        dtype = next(own)  # embedding and norms are not quantised
        return dict(merged_weights(weights, description.adapters, lambda tensor: in_full(tensor, dtype)))


def read_adapters(folder: Path) -> tuple[dict[str, Tensor], AdapterKind, str | None]:
    """Return the adapters of a checkpoint as `read_weights` does its weights, their kind, and the path of their base model.

    Raises CheckpointError if the checkpoint is damaged, has no adapters, or has a value head that was trained beside them.
    """
    weights, description = _model(folder)
    if not description.adapters or description.head != "lm":
        got = "no adapters" if not description.adapters else f"a {description.head} head that was trained beside them"
        raise CheckpointError(f"{folder}: got {got}, expected a policy with adapters; export the merged model")
    with _belonging_together(folder):
        return *_adapters(weights, description), description.base


@contextmanager
def _belonging_together(folder: Path) -> Iterator[None]:
    """Raise CheckpointError if a description names layers that the tensors do not have."""
    try:
        yield
    except (LookupError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: checkpoint.json does not belong to these tensors ({type(error).__name__}: {error})"
        ) from None


def _adapters(weights: dict[str, Tensor], description: Description) -> tuple[dict[str, Tensor], AdapterKind]:
    found = dict(adapter_weights(weights))
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
