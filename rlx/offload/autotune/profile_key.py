"""What measured figures depend on, in words that JSON can hold: two runs with equal descriptions measure the same.

Layers are described when they are called, where FSDP has gathered their weights in the dtype in which they compute.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlx.offload.recompute.ambient_state import has_autocast
from rlx.offload.runtime.options import OffloadOptions
from rlx.offload.tiling.tiling import TiledForward

# Of `OffloadOptions`: how bytes travel, which takes the host's time, and which of them do.
_OPTIONS = ("min_bytes", "pin_memory", "use_streams", "prefetch_layers", "max_inflight_bytes", "tier")
_PLAIN = (bool, int, float, str, type(None))
_PLACES = (
    "layer_idx",
    "layer_id",
    "training",
)  # tell layers apart that are alike; `training` is told of the whole layer
_KERNELS = ("flash_attn", "flash_attn_interface", "liger_kernel", "triton")  # packages whose kernels layers may call


class LayerKey(NamedTuple):
    """A layer: its class, and a digest of all that is known of it."""

    kind: str
    digest: str


def describe_layer(module: nn.Module) -> LayerKey:
    """Classes, plain attributes and tensors of a layer and of what is inside, and which of that is computed in tiles."""
    parts = [
        (path, _class_name(inner), _plain_of(inner), _attention_of(inner), _tensors_of(inner), _tiles_of(inner))
        for path, inner in module.named_modules()
    ]
    text = json.dumps([module.training, parts], sort_keys=True, default=str)
    return LayerKey(_class_name(module), hashlib.sha256(text.encode()).hexdigest()[:16])


def describe_around(model: nn.Module, layers: Sequence[str]) -> dict[str, Any]:
    """What a model has beside the layers of these names: its class, and a digest of its parameters there."""
    inside = tuple(f"{name}." for name in layers)
    named = [_look(name, tensor) for name, tensor in model.named_parameters() if not name.startswith(inside)]
    return {"class": _class_name(model), "digest": hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]}


def describe_call(tensors: Iterable[Tensor], device: torch.device) -> dict[str, Any]:
    """Under which settings of torch, and with what kinds of tensors, a layer is called."""
    kind = device.type
    is_cast = has_autocast(kind) and torch.is_autocast_enabled(kind)
    return {
        "tensors": sorted(f"{tensor.dtype} of {tensor.dim()}, {tensor.requires_grad}" for tensor in tensors),
        "autocast": str(torch.get_autocast_dtype(kind)) if is_cast else None,
    }


def describe_machine(device: torch.device, options: OffloadOptions) -> dict[str, Any]:
    """The device, the versions of what computes on it, torch's settings, the options and how many ranks there are."""
    is_on_host = device.type == "cpu"
    named = "CPU" if is_on_host else str(torch.get_device_module(device.type).get_device_name(device))
    cuda: Any = torch.backends.cuda  # these functions carry no types
    sdpa = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    return {
        "device": named,
        "threads": torch.get_num_threads() if is_on_host else 0,
        "torch": torch.__version__,
        "sdpa": list(sdpa),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "ranks": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "engine": _engine_digest(),
    }


def describe_packages(layers: Iterable[LayerKey]) -> dict[str, str]:
    """The versions of the packages that layers come from, and of kernels that are loaded."""
    names = {layer.kind.partition(".")[0] for layer in layers} | set(_KERNELS)
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in sorted(names)}
    return {name: str(version) for name, version in versions.items() if version is not None}


@functools.cache
def _engine_digest() -> str:
    """Of the code that measures: what it says of a layer changes with it."""
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*.py"), *folder.glob("plan/costs.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _plain_of(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in sorted(vars(module).items())
        if type(value) in _PLAIN and not name.startswith("_") and name not in _PLACES
    ]


def _attention_of(module: nn.Module) -> list[tuple[str, Any]]:
    """What the configuration that transformers gives to a module says of attention, the kernel among it."""
    found = getattr(getattr(module, "config", None), "__dict__", {})
    return [(k, v) for k, v in sorted(found.items()) if type(v) in _PLAIN and ("attn" in k or "attention" in k)]


def _tensors_of(module: nn.Module) -> list[tuple[Any, ...]]:
    # FSDP1 puts plain tensors in the place of parameters while they are gathered.
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False)), **vars(module)}
    return [_look(name, value) for name, value in sorted(own.items()) if isinstance(value, Tensor)]


def _look(name: str, tensor: Tensor) -> tuple[Any, ...]:
    return name, type(tensor).__name__, list(tensor.shape), str(tensor.dtype), tensor.requires_grad


def _tiles_of(module: nn.Module) -> str | None:
    forward = vars(module).get("forward")
    return f"tiles of {forward.positions_per_tile}" if isinstance(forward, TiledForward) else None
