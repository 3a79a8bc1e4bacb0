"""The modes that are compared: rlx's own and their peers."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rlx.offload.api import ActivationOffloading, enable_activation_offloading
from rlx.offload.runtime.layers import find_layers
from rlx.offload.runtime.options import SAVE_MODES, OffloadOptions
from rlx.offload.streaming.layers import LayerOffloading, enable_layer_offloading
from rlx.offload.tiling.tiling import enable_tiling

Around = Callable[[], AbstractContextManager[Any]]


class NotInstalledError(Exception):
    """A peer is not installed, or not in the needed version."""


class EnabledMode(NamedTuple):
    """A mode that is switched on for a model: contexts around forward and around the step."""

    handle: ActivationOffloading | None = None
    streaming: LayerOffloading | None = None
    around_forward: Around = contextlib.nullcontext
    around_step: Around = contextlib.nullcontext


class Mode(NamedTuple):
    """A mode as the user asked for it."""

    name: str  # for the table
    kind: str  # a key of `MODE_DESCRIPTIONS`
    options: OffloadOptions | None  # for rlx's own modes
    tile: int | None = None  # tokens per tile of MLPs and norms; 0: chosen by length and width; None: no tiles
    resident: int | None = None  # layers whose frozen weights stay on the device, others stream; None: nothing streams
    weights_in: str | None = None  # folder whose disk takes the weights that stream; None: host memory

    @property
    def warm_up(self) -> int:
        """Least number of steps before timing: `auto` mostly measures in two steps and plans after them."""
        return 3 if self.kind == "auto" else 1

    def prepare(self, model: nn.Module) -> EnabledMode:
        """Switch the mode on for a model. Raises NotInstalledError if it is a peer that is not installed."""
        if self.tile is not None:
            enable_tiling(model, self.tile or None)
        streaming = None
        if self.resident is not None:
            streaming = enable_layer_offloading(model, resident_layers=self.resident, directory=self.weights_in)
        if self.options is not None:
            handle = enable_activation_offloading(model, SAVE_MODES[self.kind].recomputes, self.options)
            return EnabledMode(handle, streaming)
        return PEERS[self.kind](model)


def parse_mode(text: str, defaults: dict[str, Any]) -> Mode:
    """Parse `NAME`, `NAME:tile=auto`, `NAME:tile=TOKENS` or, for rlx's own modes, `NAME:option=value:...`.

    Rlx's own modes take `resident=LAYERS` last, or `resident=LAYERS:weights_in=FOLDER`. Options that the text does not set are those of `defaults`.

    Raises:
        ValueError: for an unknown name, an option that does not exist or a value that is refused.
    """
    kind, *pairs = text.split(":")
    if kind not in MODE_DESCRIPTIONS:
        raise ValueError(f"mode {kind!r} does not exist; choose from {', '.join(MODE_DESCRIPTIONS)}")
    tile = resident = weights_in = None
    if len(pairs) > 1 and pairs[-1].startswith("weights_in=") and pairs[-2].startswith("resident="):
        weights_in = pairs.pop().removeprefix("weights_in=")
    if pairs and pairs[-1].startswith("resident="):
        value = pairs.pop().removeprefix("resident=")
        if not value.isdecimal() or kind in PEERS:
            raise ValueError(f"mode {text!r}: got resident={value}, expected a number of layers, and a mode of rlx")
        resident = int(value)
    if pairs and pairs[-1].startswith("tile="):
        value = pairs.pop().removeprefix("tile=")
        if value != "auto" and not (value.isdecimal() and int(value)):
            raise ValueError(f"mode {text!r}: got tile={value}, expected auto or tokens, at least 1")
        tile = 0 if value == "auto" else int(value)
    if kind in PEERS:
        if pairs:
            own = ", ".join(OWN_MODES)
            raise ValueError(f"mode {text!r}: only {own} take options other than tile, which comes last")
        return Mode(text, kind, None, tile)
    chosen = dict(defaults)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name == "save" or name not in OffloadOptions.__dataclass_fields__:
            raise ValueError(f"mode {text!r}: got {pair!r}, expected option=value with an option of OffloadOptions")
        chosen[name] = _value(value)
    return Mode(text, kind, OffloadOptions(**{**chosen, "save": kind}), tile, resident, weights_in)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def _plain(model: nn.Module) -> EnabledMode:
    return EnabledMode()


def _checkpointing(model: nn.Module, context_fn: Callable[[], Any] | None = None, **options: Any) -> EnabledMode:
    # transformers 5.17 knows the old name only, 5.23 warns of it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    assert callable(enable)
    if missing := options.keys() - inspect.signature(enable).parameters:
        raise NotInstalledError(f"this transformers has no checkpointing with {min(missing)}=")
    enable({"use_reentrant": False, **({"context_fn": context_fn} if context_fn else {})}, **options)
    return EnabledMode()


def _selective(model: nn.Module) -> EnabledMode:
    """torch's selective checkpointing, which keeps the results of attention and recomputes the rest."""
    kept = {
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
        for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    }

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return _checkpointing(model, functools.partial(create_selective_checkpoint_contexts, policy))


def _save_on_cpu(model: nn.Module) -> EnabledMode:
    _checkpointing(model)
    device = next(model.parameters()).device
    pin_memory = device.type != "cpu"  # without an accelerator torch has no page-locked memory
    return EnabledMode(around_forward=lambda: save_on_cpu(pin_memory=pin_memory, device_type=device.type))


def _trl(model: nn.Module) -> EnabledMode:
    _checkpointing(model)
    return _trl_all(model)


def _trl_all(model: nn.Module) -> EnabledMode:
    if importlib.util.find_spec("trl") is None:
        raise NotInstalledError("trl is not installed")
    from trl.models.activation_offloading import OffloadActivations

    offload = OffloadActivations()
    offload.update_model_params(model)
    return EnabledMode(around_step=lambda: offload)  # around forward and backward, as in TRL's trainers


def _axolotl(model: nn.Module) -> EnabledMode:
    """The mechanism of its key `layer_offloading`, with the `gradient_checkpointing` of the same configuration."""
    package = importlib.util.find_spec("axolotl")
    if package is None or not package.submodule_search_locations:
        raise NotInstalledError("axolotl is not installed")
    # By its file, because the packages around it import all of axolotl's trainers.
    file = Path(package.submodule_search_locations[0], "core", "trainers", "mixins", "layer_offloading.py")
    found = importlib.util.spec_from_file_location("axolotl_layer_offloading", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except (ImportError, FileNotFoundError) as error:
        raise NotInstalledError(f"this axolotl has no layer offloading ({error})") from None
    _checkpointing(model)
    manager = module.LayerOffloadManager(model)
    if not manager.enabled:
        raise NotInstalledError("axolotl streams decoder layers on CUDA alone")
    manager.setup_hooks()

    @contextlib.contextmanager
    def around_step() -> Iterator[None]:
        manager.pre_step()
        yield
        manager.post_step()

    return EnabledMode(around_step=around_step)


PEERS: dict[str, Callable[[nn.Module], EnabledMode]] = {
    "plain": _plain,
    "checkpointing": _checkpointing,
    "selective": _selective,
    "transformers-offload": functools.partial(_checkpointing, offload=True),
    "save-on-cpu": _save_on_cpu,
    "trl": _trl,
    "trl-all": _trl_all,
    "axolotl": _axolotl,
}
MODE_DESCRIPTIONS = {
    "plain": "no checkpointing, nothing offloaded",
    "checkpointing": "transformers' checkpointing, non-reentrant",
    "selective": "torch's selective checkpointing, which keeps attention's results",
    "boundary": "rlx: layer inputs offloaded, the rest recomputed",
    "attention": "rlx: attention's outputs offloaded as well, and not recomputed",
    "auto": "rlx: what to keep, offload and recompute is planned from a measured pass",
    "all": "rlx: every saved tensor offloaded",
    "transformers-offload": "transformers' checkpointing with its offload=True",
    "save-on-cpu": "transformers' checkpointing inside torch's save_on_cpu(pin_memory=True)",
    "trl": "transformers' checkpointing inside TRL's OffloadActivations",
    "trl-all": "TRL's OffloadActivations without checkpointing",
    "axolotl": "axolotl's layer_offloading inside transformers' checkpointing, with --frozen",
}
OWN_MODES = tuple(name for name in MODE_DESCRIPTIONS if name not in PEERS)


ADAPTER_RANK = 16


def add_adapters(model: nn.Module) -> nn.Module:
    """Freeze a model and give each linear map of its layers a LoRA adapter of peft, in the type of the model."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise NotInstalledError(f"--frozen trains adapters of peft, which cannot be imported: {error}") from None
    inside = ((f"{name}.{path}", m) for name, layer in find_layers(model, None) for path, m in layer.named_modules())
    targets = [path for path, module in inside if isinstance(module, nn.Linear)]
    model.requires_grad_(False)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    inject_adapter_in_model(LoraConfig(r=ADAPTER_RANK, lora_alpha=2 * ADAPTER_RANK, target_modules=targets), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # peft makes fp32 beside a quantised weight
    return model.train()
