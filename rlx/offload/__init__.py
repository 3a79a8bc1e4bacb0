"""Activation offloading: what autograd keeps for backward waits off the device.

A library of its own: imports torch only and works on any `nn.Module` in any training loop.
"""

from rlx.offload.arena import Account, Block, HostArena, host_arena
from rlx.offload.checkpoint import RecomputeError
from rlx.offload.disk import DiskError
from rlx.offload.handle import ActivationOffloading, enable_activation_offloading, offload_activations
from rlx.offload.options import OffloadOptions
from rlx.offload.places import trim
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
