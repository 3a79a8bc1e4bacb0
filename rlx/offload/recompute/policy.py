"""The decisions that boundary mode leaves open: a policy may keep more than a layer's inputs, or measure the layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from rlx.offload.recompute.ambient_state import RandomState
from rlx.offload.recompute.collector import Collector
from rlx.offload.recompute.stash import StashedTensor


class LayerRecording(Protocol):
    """The layer call, as a policy sees it while forward runs."""

    @property
    def slot_count(self) -> int:
        """The number of tensors that autograd has saved so far."""

    def saved_since(self, slot: int) -> list[Tensor]:
        """Return the tensors of the slots from `slot` on."""

    def stash(self, tensor: Tensor) -> StashedTensor | None:
        """Offload a result, or keep it on the device if it is small; None if the host has no room."""

    def keep(self, tensor: Tensor) -> StashedTensor:
        """Keep a result on the device."""

    def random_state(self) -> RandomState:
        """Return the state of the random generators."""


Around = Callable[[Collector], AbstractContextManager[object]]  # makes a context to recompute in
Run = Callable[..., list[Tensor]]  # runs forward again, in an `Around` if given; returns the saved tensors


class RecomputePolicy:
    """A layer call's policy. This base class is boundary mode: offload the inputs, recompute everything else.

    A policy belongs to one layer call, and the graph keeps both alive. It must hold no reference to the call.

    Attributes:
        offloads_inputs: whether the layer's inputs are offloaded; else they are kept on the device.
        prefetches_early: prefetch the layer before this one when recomputation begins, not below a slot.
        reuses_results: whether a recomputation may use results of forward. Its graph would hold these results, so the
            saved tensors are detached from the graph.
    """

    offloads_inputs = True
    prefetches_early = False
    reuses_results = False

    def begin_forward(self, recording: LayerRecording) -> AbstractContextManager[object] | None:
        """Return a context to run forward in, or None."""
        return None

    def end_forward(self, context: Any, outputs: Any) -> None:
        """Close the context that `begin_forward` returned, while the saved tensors of forward are still alive."""

    def release_forward(self) -> None:
        """The saved tensors of forward have been released."""

    def begin_recompute(self) -> None:
        """Backward has reached the layer."""

    def recompute(self, run: Run) -> list[Tensor]:
        """Return the saved tensors of a recomputation."""
        return run()

    def end_recompute(self) -> None:
        """The layer has been recomputed; its backward follows."""

    def prefetch_below(self, slots: int) -> int:
        """Return the slot of `slots` below which backward prefetches the layer before this one. Example: of 20, at slot 9."""
        return (slots + 1) // 2

    def first_threshold(self, prefetch_below: int) -> int:
        """Return the slot below which `pass_threshold` is called first."""
        return prefetch_below

    def pass_threshold(self, slot: int) -> int:
        """Backward has passed a threshold: it asks for `slot`, which lies below. Return the next threshold; 0: there is none."""
        return 0


BOUNDARY = RecomputePolicy()
