"""An engine's weights and optimizer state: given out in full, saved, and loaded."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW

from rlx.checkpoint.manifest import CheckpointError, few
from rlx.checkpoint.role import Description, read_description, write_extra_files
from rlx.checkpoint.tensors import load
from rlx.config.schema import ModelConfig
from rlx.engine.build import everywhere, require_finite
from rlx.engine.fsdp_units import local
from rlx.engine.memory import Memory
from rlx.engine.optimizer import MASTER
from rlx.engine.optimizer_state import Stepper
from rlx.engine.saving import CheckpointWriter
from rlx.engine.sharding import Sharded
from rlx.models.hf_folder import FolderParts
from rlx.models.loading import ModelError
from rlx.models.lora import Adapter, adapter_weights, merged_weights
from rlx.offload.streaming.nf4 import in_full

WRAPPED = "_fsdp_wrapped_module."  # what FSDP1 adds to names
Named = Iterator[tuple[str, Tensor]]
logger = logging.getLogger(__name__)


class Weights:
    """The weights of one engine, with the optimizer's state if it is trained. All processes call each method together."""

    def __init__(
        self,
        sharded: Sharded,
        memory: Memory,
        stepper: Stepper | None,
        adapted: dict[str, Adapter],
        model: ModelConfig,
        stored: torch.dtype,
        folder_parts: FolderParts,
        writer: CheckpointWriter,
    ):
        self._sharded, self._memory, self._stepper, self._writer = sharded, memory, stepper, writer
        self.adapted, self.model, self._stored, self.folder_parts = adapted, model, stored, folder_parts

    def full(self) -> Named:
        """Yield each weight's name in the model's own state_dict and its full tensor on the device; a tied weight once.

        Adapters are merged in, quantised weights dequantised. All processes iterate to the end. The receiver may keep the tensors.
        """
        return self._gathered(lambda tensors, get: merged_weights(tensors, self.adapted, get))

    def base(self) -> Named:
        """Yield the weights of the model with its adapters off, as `full` does."""
        return self._gathered(lambda tensors, get: merged_weights(tensors, {}, get))

    def adapters(self) -> Named:
        """Yield the parameters of the adapters alone, as `full` does."""
        return self._gathered(adapter_weights)

    @torch.no_grad()
    def _gathered(self, chosen: Callable[..., Named]) -> Named:
        self._memory.to_device(optimizer=False)
        in_type = in_full if self.model.quantization is not None else lambda tensor, dtype: tensor
        for unit in self._sharded.units:
            with self._sharded.gathering(unit) as gather:
                yield from chosen(unit.tensors(), lambda t, get=gather: in_type(get(t), self._stored))

    def save(self, folder: str | Path, contents: tuple[str, ...]) -> None:
        self.begin_save(folder, contents)
        self.finish_save()

    def begin_save(self, folder: str | Path, contents: tuple[str, ...], in_background: bool = False) -> None:
        """Start to write a checkpoint to a folder that all processes share; it appears at the end of `finish_save`.

        `contents` are those of CheckpointConfig.save_contents. In the background the engine can be used meanwhile.
        """
        self._memory.free_gathered()
        if not (in_place := self.saves_in_place(contents)):
            self._memory.to_device(optimizer=not self._sharded.state_dict_shares_storages)
        counters = (0, 0) if self._stepper is None else (self._stepper.updates, self._stepper.steps)
        own = self.adapted, self.model.quantization, self.model.path
        description = Description(self.folder_parts.head, tuple(contents), *counters, *own)
        parts = self._parts(description)
        partial = self._writer.begin(Path(folder), parts, self._memory.offloads, in_background, self._memory.frozen)
        streamed = self.full() if "hf_model" in contents else ()
        weights = {name: tensor.cpu() for name, tensor in streamed if dist.get_rank() == 0}
        if dist.get_rank() == 0:
            files = partial, description, self.folder_parts, weights
            self._writer.write_extra_files(lambda: write_extra_files(*files))
        if not in_place:
            self._memory.to_host(parameters=False)

    def saves_in_place(self, contents: tuple[str, ...]) -> bool:
        """Whether `begin_save` reads the state where it is and needs no device memory."""
        return self._sharded.state_dict_shares_storages and "hf_model" not in contents

    @property
    def is_written(self) -> bool:
        return self._writer.is_written

    def finish_save(self) -> None:
        self._writer.finish()

    def load(self, folder: str | Path, to_train: bool = True) -> None:
        """Continue from a checkpoint of any number of processes and either strategy; its digests are not checked.

        Without `to_train` the optimizer's state is not read. If the checkpoint lacks that or the position in the schedule, these start
        from zero, with a warning. Raises CheckpointError if there is no model that fits.
        """
        folder, sharded, stepper = Path(folder), self._sharded, self._stepper if to_train else None
        self._writer.finish()
        self._memory.free_gathered()
        on_host = stepper.on_host if stepper is not None and sharded.state_dict_shares_storages else None
        self._memory.to_device(optimizer=on_host is None)
        description = read_description(folder)
        head = self.folder_parts.head
        if description.head != head or "model" not in description.contents:
            raise CheckpointError(
                f"{folder}: got head {description.head} and contents {list(description.contents)}, expected head {head} and "
                "a model among the contents; to resume, save with checkpoint.save_contents=[model,optimizer,extra]"
            )
        _require_same_scale(folder, description.adapters, self.adapted)
        model = get_model_state_dict(sharded.root, options=sharded.state_options)
        load(_tensors(model), folder / "model")
        set_model_state_dict(sharded.root, model, options=sharded.state_options)
        if stepper is not None:
            saved = folder / "optimizer"
            stepper.optimizer.state.clear()

            def make() -> None:
                if saved.is_dir():
                    _read_optimizer(saved, sharded, stepper.optimizer)

            make() if on_host is None else on_host.replace(make)
            stepper.updates, stepper.steps = description.updates, description.steps
            if not saved.is_dir() and description.steps:
                logger.warning("%s holds no optimizer state: AdamW's moments start from zero", folder)
                stepper.steps = 0
            if "extra" not in description.contents and description.updates:
                logger.warning("%s holds no extra: the learning-rate schedule restarts", folder)
                stepper.updates = 0
        try:
            require_finite(str(folder), sharded.root.named_parameters())
        except ModelError as error:
            raise CheckpointError(str(error)) from None
        self._memory.to_host(parameters=False)

    def _parts(self, description: Description) -> dict[str, dict[str, Tensor]]:
        """Return the sharded state to save, by the name of its folder. The storages are the engine's own."""
        parts: dict[str, dict[str, Tensor]] = {}
        if "model" in description.contents:
            options = self._sharded.state_options
            parts["model"] = _tensors(get_model_state_dict(self._sharded.root, options=options))
        # Asking an optimizer for its state before its first step makes it take an empty step.
        if "optimizer" in description.contents and description.steps and self._stepper is not None:
            parts["optimizer"] = _tensors(_optimizer_state(self._sharded, self._stepper.optimizer))
        return parts


def _optimizer_state(sharded: Sharded, optimizer: AdamW) -> dict[str, Any]:
    return get_optimizer_state_dict(sharded.root, optimizer, options=_flat(sharded))


def _flat(sharded: Sharded) -> StateDictOptions:
    return replace(sharded.state_options, flatten_optimizer_state_dict=True)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Leave out numbers such as learning rates, which come from the configuration; torchao's are tensors."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if not name.startswith("param_groups.")}


def _require_same_scale(folder: Path, saved: Mapping[str, Adapter], own: Mapping[str, Adapter]) -> None:
    """Reject adapters that would count more or less than they did when they were trained; their tensors would fit."""
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
            "save without the optimizer to start with new moments"
        ) from None
    set_optimizer_state_dict(sharded.root, optimizer, state, options=_flat(sharded))
    for name, parameter in sharded.root.named_parameters():
        if f"state.{name.replace(WRAPPED, '')}" in lacking:  # it never had a gradient, so it has no state yet
            optimizer.state.pop(parameter, None)
    states = ((n, p, optimizer.state.get(p, {})) for n, p in sharded.root.named_parameters())
    faults = [fault for name, p, state in states for fault in _faults_of(name.replace(WRAPPED, ""), local(p), state)]
    if faults := everywhere(faults):
        raise CheckpointError(
            f"{folder} holds a state that AdamW cannot have: {few(faults)}; take another checkpoint, or remove this folder and save "
            "without the optimizer to start with new moments"
        )


def _faults_of(name: str, parameter: Tensor, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what would ruin a parameter's shard at the next step, though names, shapes and types are right."""
    for key, value in state.items():
        own = local(value) if isinstance(value, Tensor) else torch.tensor(value)
        if type(own) is not Tensor:  # moments of torchao, whose 8 bits are always numbers
            continue
        if not own.isfinite().all():
            yield f"{name}.{key} is NaN or infinite"
        elif (key == "step" and own < 1) or (key == "exp_avg_sq" and (own < 0).any()):
            yield f"{name}.{key} is {own.min():g}, which is too small"
        elif key == MASTER and not torch.equal(own.to(parameter.dtype), parameter):
            yield f"{name}.{key} is not the weight in fp32"
