"""Instructions for one layer call: which results it keeps, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerInstructions:
    """A plan's decisions for one layer. A layer's calls of attention and of linear maps are numbered 0, 1, 2, … in order."""

    keep: bool = False  # run the layer without recomputation; the other fields have no effect then
    offload_boundary: bool = True  # offload the layer's inputs; else keep them on the device
    on_device: frozenset[int] = frozenset()  # cached ops whose results are kept on the device
    off_device: frozenset[int] = frozenset()  # cached ops whose results are offloaded
    # Of all calls, by `call_name`; None: any. From the first call with another name on, no call is cached.
    call_names: tuple[str, ...] | None = None
    # When to prefetch the layer before: as this layer's recomputation begins; else when backward reaches a call, or asks for
    # a slot below a number. None: when backward has passed the operations after attention.
    prefetch_early: bool = False
    prefetch_call: int | None = None
    prefetch_below: int | None = None
    saved_bytes: int = 0  # by autograd in the layer, if known

    @property
    def cached_ops(self) -> frozenset[int]:
        """The operations whose results are kept."""
        return self.on_device | self.off_device
