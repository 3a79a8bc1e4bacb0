"""The passes of one length with `save="auto"`: their profile and their plan.

Note [a device that waits for the host]
The host needs about as long to profile all operations of a layer as the device needs to compute it with a few thousand tokens. If
the device waits for the host, operations look slower than they are, above all small ones. So if the device may have waited in
most layers of a pass, the next four passes profile the operations of a quarter of the layers each: layers 0, 4, 8, …, then
layers 1, 5, 9, …, and so on. In the layers between them the host gets ahead of the device. Times of layers that may have waited
are ignored, if there are other layers of their kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.offload.autotune.layer_profile import LayerProfile, PassState
from rlx.offload.autotune.pass_profile import PassProfile, measured
from rlx.offload.plan.costs import Budget
from rlx.offload.plan.planner import Plan
from rlx.offload.replay.instructions import LayerInstructions

LAYER_STRIDE = 4  # a pass profiles one of this many layers (Note [a device that waits for the host])
Key = tuple[int, int]  # of a bucket: index of the device among those in use, and the logarithm of the length


class LengthBucket:
    """The passes of one length, their profile and the plan made from it."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.plan: Plan | None = None
        self.instructions: dict[int, LayerInstructions] = {}
        self.profile: PassProfile | None = None
        self.is_cached = False  # the profile comes from an earlier run
        self.budget: Budget | None = None  # on which ranks have agreed
        self.device_bytes = 0  # in the budget of the plan
        self.passes = 0
        self.last_index = -1  # of the layer called last
        self.is_measuring = False
        self.state = PassState()  # of the pass that was profiled last
        self.call: Mapping[str, Any] = {}  # how its layers were called
        # Passes that have profiled a part of the layers, and these layers (Note [a device that waits for the host]).
        self._sampled_passes: int | None = None
        self._sampled_layers: dict[int, LayerProfile] = {}

    def sees_calls(self, layer_index: int) -> bool:
        """Return whether this pass profiles the operations of a layer."""
        return self._sampled_passes is None or layer_index % LAYER_STRIDE == self._sampled_passes % LAYER_STRIDE

    def begin_measuring(self, state: PassState, call: Mapping[str, Any]) -> None:
        """Begin to profile a pass, unless the graph of a profiled pass is alive or the device has not finished that pass."""
        self.is_measuring = not self.state.is_alive and not self.state.is_complete
        if self.is_measuring:
            self.state, self.call = state, call

    def take(self) -> PassProfile | None:
        """Return the profile of a pass, once, after all its layers were recomputed and the device has finished them."""
        state = self.state
        if self.profile is not None or not state.is_complete:
            return None
        if not all(layer.is_known for layer in state.done.values()):
            return None
        found, self.is_measuring = dict(state.done), False
        state.clear()
        host_bound = sum(layer.is_host_bound for layer in found.values())
        if self._sampled_passes is None and not state.is_warm_up and 2 * host_bound > len(found):
            self._sampled_passes = 0
            return None
        if self._sampled_passes is not None:
            self._sampled_passes += 1
            self._sampled_layers |= {index: layer for index, layer in found.items() if layer.sees_calls}
            if not self._sampled_layers.keys() >= found.keys():
                return None
            found, self._sampled_layers, self._sampled_passes = self._sampled_layers, {}, None
        layers = [found[index] for index in sorted(found)]
        return measured(layers, state.loss_bytes, state.loss_s)

    def drop(self) -> None:
        """Discard the profile of a pass whose layers were all recomputed, though the device has not finished them."""
        if self.state.is_complete:
            self.state.clear()

    def forget(self) -> None:
        """Discard the profile, which comes from an earlier run."""
        self.profile, self.is_cached = None, False

    def replan(self) -> None:
        """Discard the plan and keep the profile."""
        self.plan = self.budget = None
