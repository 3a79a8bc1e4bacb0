"""Write and read checkpoints of one role with torch.distributed.checkpoint (DCP), completely or not at all.

<folder>/checkpoint.json    description: head, counters, contents
<folder>/card/              config, generation config and tokenizer of the model
<folder>/model/             full tensors by name, in shards (DCP); the same for FSDP1 and FSDP2
<folder>/optimizer/         AdamW's state in the same form, if the optimizer has stepped
<folder>/hf_model/          a folder for from_pretrained, if asked for
"""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW

from rlx.engine.sharding import Sharded
from rlx.errors import ExplainedError
from rlx.models.lora import Adapter, merged_weights

CHECKPOINT_FORMAT = 1
logger = logging.getLogger(__name__)


class CheckpointError(ExplainedError, ValueError):
    """A checkpoint lacks a part that the reader needs."""


@dataclass(frozen=True)
class Description:
    """checkpoint.json.

    Attributes:
        head: `lm` or `value`.
        contents: the parts that were saved.
        updates: optimizer steps asked for, including skipped ones; the learning rate follows them.
        steps: optimizer steps taken.
        adapters: LoRA layers in `model`, as `rlx.models.lora.add_lora` names them.
        format: version of this layout.
    """

    head: str
    contents: tuple[str, ...]
    updates: int
    steps: int
    adapters: dict[str, Adapter]
    format: int = CHECKPOINT_FORMAT


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; at the end it replaces `folder` if no process failed. All processes join.

    All processes share the file system. A crash leaves `folder` unchanged and a `.<name>.partial` next to it, which the next
    attempt removes.
    """
    partial, old = folder.parent / f".{folder.name}.partial", folder.parent / f".{folder.name}.old"
    several = dist.is_initialized()
    first = not several or dist.get_rank() == 0
    if first:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    if several:
        dist.barrier()
    yield partial
    if several:
        dist.barrier()
    if first:
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    if several:
        dist.barrier()


def write(partial: Path, description: Description, sharded: Sharded, optimizer: AdamW | None) -> None:
    """Write checkpoint.json and the parts that DCP stores; all processes join."""
    if "model" in description.contents:
        dcp.save(get_model_state_dict(sharded.root, options=sharded.state_options), checkpoint_id=partial / "model")
    # Asking an optimizer for its state before its first step makes it take an empty step.
    if "optimizer" in description.contents and optimizer is not None and description.steps:
        state = get_optimizer_state_dict(sharded.root, optimizer, options=sharded.state_options)
        dcp.save(state, checkpoint_id=partial / "optimizer")
    if dist.get_rank() == 0:
        (partial / "checkpoint.json").write_text(json.dumps(asdict(description), indent=2) + "\n")


def read_description(folder: Path) -> Description:
    """Return the description of a checkpoint.

    Raises:
        CheckpointError: the folder is no checkpoint, or one of another format.
    """
    path = folder / "checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no checkpoint.json; expected a finished checkpoint of one role, such as .../global_step_N/actor"
        )
    fields = json.loads(path.read_text())
    if fields.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(f"{path}: got format {fields.get('format')}, this version reads {CHECKPOINT_FORMAT}")
    adapters = {layer: Adapter(*values) for layer, values in fields["adapters"].items()}
    return Description(**{**fields, "contents": tuple(fields["contents"]), "adapters": adapters})


def read(folder: Path, head: str, sharded: Sharded, optimizer: AdamW | None) -> Description:
    """Replace model and optimizer by those of a checkpoint; all processes join.

    Any number of processes and either kind of FSDP may have written it. If it lacks the optimizer's state or the position in the
    schedule, these start anew, with a warning.

    Returns:
        The description, with the counters from which to continue.

    Raises:
        CheckpointError: it is no checkpoint, has no model, or its model has another head.
    """
    description = read_description(folder)
    if description.head != head or "model" not in description.contents:
        raise CheckpointError(
            f"{folder}: got head {description.head} and contents {list(description.contents)}, expected head {head} and a "
            "model among the contents; to resume, save with checkpoint.save_contents=[model,optimizer,extra]"
        )
    model = get_model_state_dict(sharded.root, options=sharded.state_options)
    dcp.load(model, checkpoint_id=folder / "model")
    set_model_state_dict(sharded.root, model, options=sharded.state_options)
    if optimizer is not None:
        optimizer.state.clear()
        if (folder / "optimizer").is_dir():
            state = get_optimizer_state_dict(sharded.root, optimizer, options=sharded.state_options)
            dcp.load(state, checkpoint_id=folder / "optimizer")
            set_optimizer_state_dict(sharded.root, optimizer, state, options=sharded.state_options)
        elif description.steps:
            logger.warning("%s holds no optimizer state: AdamW's moments start anew", folder)
            description = replace(description, steps=0)
        if "extra" not in description.contents and description.updates:
            logger.warning("%s holds no extra: the learning rate's schedule starts anew", folder)
            description = replace(description, updates=0)
    return description


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint on the CPU with adapters merged; works in a single process without process group.

    Raises:
        CheckpointError: the checkpoint holds no model.
    """
    description = read_description(folder)
    if "model" not in description.contents:
        raise CheckpointError(f"{folder}: got contents {list(description.contents)}, expected model among them")
    entries = dcp.FileSystemReader(folder / "model").read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: one process reads
        dcp.load(weights, checkpoint_id=folder / "model", no_dist=True)
    return dict(merged_weights(weights, description.adapters))
