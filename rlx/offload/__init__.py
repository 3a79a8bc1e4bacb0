"""Activation offloading: what autograd keeps for backward waits off the device.

A library of its own: imports torch only and works on any `nn.Module` in any training loop. The names below are loaded when
they are first asked for, so that `rlx.offload.plan`, which is arithmetic, does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.offload.arena import Account, Block, HostArena, host_arena
    from rlx.offload.disk import DiskError
    from rlx.offload.handle import ActivationOffloading, enable_activation_offloading, offload_activations
    from rlx.offload.options import OffloadOptions
    from rlx.offload.places import trim
    from rlx.offload.recompute_error import RecomputeError
    from rlx.offload.replay import register_attention
    from rlx.offload.stats import LayerStats, OffloadStats
    from rlx.offload.tiling import Tiling, enable_tiling

__all__ = [
    "Account",
    "ActivationOffloading",
    "Block",
    "DiskError",
    "HostArena",
    "LayerStats",
    "OffloadOptions",
    "OffloadStats",
    "RecomputeError",
    "Tiling",
    "enable_activation_offloading",
    "enable_tiling",
    "host_arena",
    "offload_activations",
    "register_attention",
    "trim",
]

_HOMES = {
    "Account": "arena",
    "Block": "arena",
    "HostArena": "arena",
    "host_arena": "arena",
    "RecomputeError": "recompute_error",
    "DiskError": "disk",
    "ActivationOffloading": "handle",
    "enable_activation_offloading": "handle",
    "offload_activations": "handle",
    "OffloadOptions": "options",
    "trim": "places",
    "register_attention": "replay",
    "LayerStats": "stats",
    "OffloadStats": "stats",
    "Tiling": "tiling",
    "enable_tiling": "tiling",
}


def __getattr__(name: str) -> Any:
    """The public name `name`, from the module that it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
