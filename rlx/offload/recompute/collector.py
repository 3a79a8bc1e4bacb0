"""The tensors that autograd saves while a layer is recomputed, and the point at which the recomputation stops.

Note [layers on several streams]
A layer may compute on streams of its own, and wait for them before it uses their results. A recomputation that stops after
the last saved tensor would skip the waits behind it. So a layer that saves a tensor on another stream than the one on
which its recomputation began is run to its end, in this recomputation and all later ones.

Asking for the current stream takes time. The hook asks at every tensor if the layer's saved tensors have new shapes or
dtypes, otherwise at the last tensor only. If backward reaches a part on a side stream first, the recomputation begins on
that stream and sees no other. So this stream is compared with the one on which forward began.

Backward may read the tensors on any of the streams. Each of them first waits for the recomputation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlx.offload.recompute.ambient_state import AmbientState, RandomState
from rlx.offload.recompute.module_state import TensorSites
from rlx.offload.recompute.saved_slots import SavedSlots, TensorSpecs
from rlx.offload.runtime.session import Layer


class RecomputedLayer(Layer):
    """A layer that is recomputed."""

    sites: TensorSites | None = None  # where it keeps parameters and buffers; found at its first forward
    specs: TensorSpecs | None = None  # of the tensors that autograd saved in its last forward
    uses_streams = False  # whether it computes on several streams
    specs_checked: TensorSpecs | None = None  # the specs with which `uses_streams` was last looked for


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


_NONE: frozenset[int] = frozenset()


class _EnoughRecomputedError(BaseException):
    """Stops a recomputation. It is no Exception, so that a layer that catches those lets it pass."""


class Collector:
    """Collects the tensors of one recomputation.

    Args:
        layer: the layer that is recomputed.
        slots: the slots of its forward.
        began_on: the accelerator's stream on which forward began; None for a layer on the CPU.
        may_stop: whether the recomputation may stop after the last slot.
        ambient: the state around forward.
    """

    __slots__ = ("_ambient", "_checks_each", "_count", "_home", "_layer", "filled", "saved")

    def __init__(
        self,
        layer: RecomputedLayer,
        slots: SavedSlots,
        began_on: torch.Stream | None,
        may_stop: bool,
        ambient: AmbientState,
    ) -> None:
        self.saved: list[Tensor] = []
        self.filled: Set[int] = _NONE  # slots whose tensors were not computed
        self._layer = layer
        self._ambient = ambient
        self._home: torch.Stream | None = None
        self._checks_each = False  # see Note [layers on several streams]
        if began_on is not None:
            self._home = torch.accelerator.current_stream(began_on.device)
            layer.uses_streams = layer.uses_streams or self._home != began_on
            self._checks_each = not layer.uses_streams and layer.specs_checked is not slots.specs
            layer.specs_checked = slots.specs
        self._count = len(slots.versions) if may_stop and not layer.uses_streams else sys.maxsize

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a forward up to the last slot."""
        with saved_tensors_hooks(self._hook(), _unused):
            try:
                forward(*args, **kwargs)
            except _EnoughRecomputedError:
                return

    def _hook(self) -> Callable[[Tensor], None]:
        # The graph of the saved tensors holds the hook, so the hook must hold no reference to the layer's call.
        saved, count, layer, home = self.saved, self._count, self._layer, self._home
        if home is None:

            def collect(tensor: Tensor) -> None:
                saved.append(tensor)
                if len(saved) >= count:
                    raise _EnoughRecomputedError

            return collect
        checks_each = self._checks_each

        def collect_on_streams(tensor: Tensor) -> None:
            saved.append(tensor)
            is_last = len(saved) >= count
            if (is_last or checks_each) and _is_on_one_stream(layer, home) and is_last:
                raise _EnoughRecomputedError

        return collect_on_streams

    def fill(self, first_slot: int, tensors: list[Tensor]) -> None:
        """Fill slots with tensors that need not be computed."""
        saved = self.saved
        if first_slot != len(saved):
            self.fail(f"{first_slot} tensors were saved and {len(saved)} are at this point")
        saved.extend(tensors)
        self.filled = self.filled | set(range(first_slot, len(saved)))
        if len(saved) >= self._count and _is_on_one_stream(self._layer, self._home):
            raise _EnoughRecomputedError

    def skip_to(self, random_state: RandomState) -> None:
        """Set the random generators to a state that forward had."""
        self._ambient.skip_to(random_state)

    def fail(self, how: str) -> NoReturn:
        """Raise the error for a layer that does not repeat its forward."""
        raise not_the_same(self._layer.name, how)

    def end(self) -> torch.Event | None:
        """Return the event that other streams wait for before they read the tensors; None for a layer on one stream."""
        return self._home.record_event() if self._home is not None and self._layer.uses_streams else None


def _is_on_one_stream(layer: RecomputedLayer, home: torch.Stream | None) -> bool:
    """Whether the layer has computed on one stream only, up to now; True on the CPU."""
    if home is None:
        return True
    if torch.accelerator.current_stream(home.device) != home:
        layer.uses_streams = True
    return not layer.uses_streams


def _unused(packed: None) -> Tensor:
    raise RecomputeError(
        "backward has reached a tensor that a layer made while it was recomputed: the layer keeps it in an object outside of its "
        "modules, and a loss was made of it after a backward pass; make that loss before, or use enable_ckpt=False"
    )
