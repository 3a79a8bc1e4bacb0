"""Offloading: tensors that autograd saves for backward wait in host memory or on disk, frozen weights in host memory.

A library of its own: it imports torch only and works on any `nn.Module` in any training loop. Public names are loaded at
their first use, so that `rlx.offload.plan`, which is arithmetic, does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.offload.api import ActivationOffloading, enable_activation_offloading, offload_activations
    from rlx.offload.recompute.saved_slots import RecomputeError
    from rlx.offload.replay.replay_mode import register_attention
    from rlx.offload.runtime.options import OffloadOptions
    from rlx.offload.storage.arena import Account, Block, HostArena, host_arena
    from rlx.offload.storage.disk import DiskError, trim
    from rlx.offload.storage.stats import LayerStats, OffloadStats
    from rlx.offload.streaming.layers import LayerOffloading, enable_layer_offloading
    from rlx.offload.tiling.tiling import Tiling, enable_tiling

__all__ = [
    "Account",
    "ActivationOffloading",
    "Block",
    "DiskError",
    "HostArena",
    "LayerOffloading",
    "LayerStats",
    "OffloadOptions",
    "OffloadStats",
    "RecomputeError",
    "Tiling",
    "enable_activation_offloading",
    "enable_layer_offloading",
    "enable_tiling",
    "host_arena",
    "offload_activations",
    "register_attention",
    "trim",
]

_HOMES = {
    **dict.fromkeys(("ActivationOffloading", "enable_activation_offloading", "offload_activations"), "api"),
    **dict.fromkeys(("Account", "Block", "HostArena", "host_arena"), "storage.arena"),
    **dict.fromkeys(("LayerOffloading", "enable_layer_offloading"), "streaming.layers"),
    **dict.fromkeys(("LayerStats", "OffloadStats"), "storage.stats"),
    **dict.fromkeys(("Tiling", "enable_tiling"), "tiling.tiling"),
    "DiskError": "storage.disk",
    "OffloadOptions": "runtime.options",
    "RecomputeError": "recompute.saved_slots",
    "register_attention": "replay.replay_mode",
    "trim": "storage.disk",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
