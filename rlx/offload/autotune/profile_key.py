"""The cache key: everything that the figures of a profile depend on, in values that JSON can hold.

Layers are described when they are called, because FSDP has then gathered their weights in the dtype of their computation.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlx.offload.autotune.pass_profile import PROFILE_VERSION
from rlx.offload.recompute.ambient_state import autocast_dtype
from rlx.offload.runtime.options import OffloadOptions
from rlx.offload.tiling.tiling import TiledForward

# Options that change which bytes are copied, or how much of the host's time a copy takes. Budgets are not among them.
_OPTIONS = ("min_bytes", "pin_memory", "use_streams", "prefetch_layers", "max_inflight_bytes", "tier")
_PLAIN_TYPES = (bool, int, float, str, type(None))
# Attributes in which equal layers differ; `training` is noted once for the whole layer.
_IGNORED = ("layer_idx", "layer_id", "training")
# Packages whose kernels layers may call.
_KERNEL_PACKAGES = {"flash_attn", "flash_attn_interface", "liger_kernel", "triton"}


def digest(data: Any) -> str:
    """Return a short hash of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:32]


def describe_layer(module: nn.Module) -> str:
    """Return the layer's class and a digest of the classes, plain attributes, tensors and tiling of all modules in it."""
    inner = module.named_modules()
    parts = [(path, _class_name(child), *_settings_of(child), _tensors_of(child)) for path, child in inner]
    return f"{_class_name(module)} {digest([module.training, parts])}"


def describe_around(model: nn.Module, layers: Sequence[str]) -> str:
    """Return the model's class and a digest of its parameters outside the layers of these names."""
    inside = tuple(f"{name}." for name in layers)
    outside = [_describe_tensor(name, p) for name, p in model.named_parameters() if not name.startswith(inside)]
    return f"{_class_name(model)} {digest(outside)}"


def describe_call(tensors: Iterable[Tensor], device: torch.device) -> dict[str, Any]:
    """Return the dtypes and ranks of the tensors that a layer is called with, and the dtype of autocast."""
    cast = autocast_dtype(device.type)
    return {
        "tensors": sorted(f"{tensor.dtype} of {tensor.dim()}, {tensor.requires_grad}" for tensor in tensors),
        "autocast": None if cast is None else str(cast),
    }


def cache_key(
    layers: Mapping[int, str],
    around: str | None,
    call: Mapping[str, Any],
    devices: Sequence[torch.device],
    options: OffloadOptions,
) -> dict[str, Any]:
    """Return the key of a run's profiles: `layers` by index, `around` and `call` as the functions above describe them."""
    cuda: Any = torch.backends.cuda  # these functions carry no types
    sdpa = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    packages = {layer.partition(".")[0] for layer in layers.values()} | _KERNEL_PACKAGES
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in sorted(packages)}
    return {
        "version": PROFILE_VERSION,
        "layers": {str(index): layers[index] for index in sorted(layers)},
        "around": around,
        "call": dict(call),
        "devices": [device_name(device) for device in devices],
        "threads": torch.get_num_threads() if any(device.type == "cpu" for device in devices) else 0,
        "torch": torch.__version__,
        "packages": {name: str(version) for name, version in versions.items() if version is not None},
        "sdpa": [is_enabled() for is_enabled in sdpa],
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "ranks": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        "options": {name: getattr(options, name) for name in _OPTIONS},
    }


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device.type).get_device_name(device))


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _settings_of(module: nn.Module) -> tuple[Any, ...]:
    """Return plain attributes, the attention settings of transformers' configuration (kernel, for example), and the tile size."""
    names = sorted(name for name in vars(module) if not name.startswith("_") and name not in _IGNORED)
    plain = [(name, vars(module)[name]) for name in names if type(vars(module)[name]) in _PLAIN_TYPES]
    config = getattr(getattr(module, "config", None), "__dict__", {})
    about_attention = sorted(name for name in config if "attn" in name or "attention" in name)
    attention = [(name, config[name]) for name in about_attention if type(config[name]) in _PLAIN_TYPES]
    forward = vars(module).get("forward")
    return plain, attention, forward.tiling.positions_per_tile if isinstance(forward, TiledForward) else None


def _tensors_of(module: nn.Module) -> list[tuple[Any, ...]]:
    # FSDP1 replaces parameters by plain tensors while they are gathered.
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False)), **vars(module)}
    return [_describe_tensor(name, value) for name, value in sorted(own.items()) if isinstance(value, Tensor)]


def _describe_tensor(name: str, tensor: Tensor) -> tuple[Any, ...]:
    return name, type(tensor).__name__, list(tensor.shape), str(tensor.dtype), tensor.requires_grad
