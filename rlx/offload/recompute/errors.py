"""What is said where a layer cannot be recomputed as it was."""

from __future__ import annotations


class RecomputeError(RuntimeError):
    """Recomputing a layer did not do what its forward did."""


def too_early(layer: str) -> RecomputeError:
    """Backward has come to a layer whose forward has not ended."""
    return RecomputeError(
        f"layer {layer} runs a backward pass inside its own forward, of which not everything is "
        "known yet that has to be recomputed; use enable_ckpt=False, or leave the layer out of layers="
    )


def other_mode(layer: str, was_training: bool) -> RecomputeError:
    """A layer has been switched between training and evaluation."""
    return RecomputeError(
        f"layer {layer} was in {'training' if was_training else 'evaluation'} mode in forward "
        "and is not in backward, which has to recompute it; switch modes between steps only"
    )


def changed(layer: str, what: str) -> RecomputeError:
    """A parameter or buffer is not what it was."""
    return RecomputeError(
        f"layer {layer} has to be recomputed, but since its forward {what}, so that gradients would be "
        "wrong; change parameters and buffers only when no backward is left to do, or use enable_ckpt=False"
    )


def not_the_same(layer: str, how: str) -> RecomputeError:
    """The layer did something else this time."""
    return RecomputeError(
        f"recomputing layer {layer} did not save the tensors that its forward saved: {how}; a layer that is "
        "recomputed must do the same each time: look for state that it changes, or randomness of its own; or use enable_ckpt=False"
    )
