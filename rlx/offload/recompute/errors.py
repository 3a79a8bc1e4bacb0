"""The errors for a layer whose recomputation would differ from its forward."""

from __future__ import annotations


class RecomputeError(RuntimeError):
    """A recomputation differs from the forward that it repeats."""


def changed(layer: str, change: str) -> RecomputeError:
    """Return the error for a parameter or buffer that has changed since forward."""
    return RecomputeError(
        f"layer {layer} has to be recomputed, but since its forward {change}, so that gradients would be "
        "wrong; change parameters and buffers only when no backward is left to do, or use enable_ckpt=False"
    )


def not_the_same(layer: str, how: str) -> RecomputeError:
    """Return the error for a layer that saved other tensors than in its forward."""
    return RecomputeError(
        f"recomputing layer {layer} did not save the tensors that its forward saved: {how}; a layer that is "
        "recomputed must do the same each time: look for state that it changes, or randomness of its own; or use enable_ckpt=False"
    )
