"""What autograd saves while a layer is recomputed, and where the recomputation ends.

Note [layers on several streams]
A layer may compute on streams of its own and wait for them where it needs their results. A recomputation that is ended after
the last saved tensor would leave out the waits behind it. So where a tensor is saved on another stream than that on which
the recomputation began, the layer runs to its end, then and from then on. That is asked for each tensor when what the layer
saves is seen for the first time, and for the last tensor always. Backward may come to a part on such a stream first; then
the recomputation begins on it, and nothing else may be seen on it, so that the stream on which forward began tells. Backward
may read the tensors on any of the streams: each first waits for the recomputation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlx.offload.recompute.saved_slots import SavedSlots
from rlx.offload.runtime.session import Layer

_NONE: frozenset[int] = frozenset()


class _EnoughRecomputedError(BaseException):
    """Ends a recomputation. Not an Exception, so that no layer that catches those can swallow it."""


class Collector:
    """Takes the tensors of one recomputation.

    Args:
        layer: which layer is recomputed.
        slots: those of its forward.
        began_on: the accelerator's stream on which its forward began; None: it is on the CPU.
        ends: whether the recomputation may end after the last tensor.
        fail: raises for what is not as it was.
    """

    __slots__ = ("_count", "_fail", "_home", "_layer", "_looks", "answered", "saved")

    def __init__(
        self,
        layer: Layer,
        slots: SavedSlots,
        began_on: torch.Stream | None,
        ends: bool,
        fail: Callable[[str], NoReturn],
    ) -> None:
        self.saved: list[Tensor] = []
        self.answered: Set[int] = _NONE  # slots whose tensors were not computed
        self._layer = layer
        self._fail = fail
        self._home: torch.Stream | None = None
        self._looks = False
        if began_on is not None:
            self._home = torch.accelerator.current_stream(began_on.device)
            layer.uses_streams = layer.uses_streams or self._home != began_on
            self._looks = not layer.uses_streams and layer.kinds_looked_at is not slots.kinds
            layer.kinds_looked_at = slots.kinds
        self._count = len(slots.versions) if ends and not layer.uses_streams else sys.maxsize

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a forward until enough has been saved."""
        with saved_tensors_hooks(self._hook(), _unused):
            try:
                forward(*args, **kwargs)
            except _EnoughRecomputedError:
                return

    def _hook(self) -> Callable[[Tensor], None]:
        # The graph of what is saved holds the hook, so it holds nothing that leads to the layer's call.
        saved, count, layer, home = self.saved, self._count, self._layer, self._home
        if home is None:

            def collect(tensor: Tensor) -> None:
                saved.append(tensor)
                if len(saved) >= count:
                    raise _EnoughRecomputedError

        elif self._looks:

            def collect(tensor: Tensor) -> None:
                saved.append(tensor)
                if _is_on_one_stream(layer, home) and len(saved) >= count:
                    raise _EnoughRecomputedError

        else:

            def collect(tensor: Tensor) -> None:
                saved.append(tensor)
                if len(saved) >= count and _is_on_one_stream(layer, home):
                    raise _EnoughRecomputedError

        return collect

    def answer(self, first_slot: int, tensors: list[Tensor]) -> None:
        """Take tensors that are there already."""
        saved = self.saved
        if first_slot != len(saved):
            self._fail(f"{first_slot} tensors were saved and {len(saved)} are at this point")
        saved.extend(tensors)
        self.answered = self.answered | set(range(first_slot, len(saved)))
        if len(saved) >= self._count and (self._home is None or _is_on_one_stream(self._layer, self._home)):
            raise _EnoughRecomputedError

    def end(self) -> torch.Event | None:
        """What other streams wait for before they read the tensors; None where the layer has no other."""
        return self._home.record_event() if self._home is not None and self._layer.uses_streams else None


def _is_on_one_stream(layer: Layer, home: torch.Stream) -> bool:
    """Whether a layer has been seen on one stream only, now included."""
    if torch.accelerator.current_stream(home.device) != home:
        layer.uses_streams = True
    return not layer.uses_streams


def _unused(packed: None) -> Tensor:
    raise AssertionError("nothing is unpacked while a layer is recomputed")
