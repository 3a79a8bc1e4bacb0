"""The passes of one length with `save="auto"`: their profile and their plan.

Note [a device that waits for the host]
Profiling each operation takes the host about as long as a device computes a layer of a few thousand tokens. If the device has to
wait for the host, operations look slower than they are, above all small ones. So if it may have waited in most layers of a pass,
only every fourth layer's operations are profiled in the next pass, the next ones' in the pass after, and so on until all have
been. In the layers between them the host gets ahead of the device. Times of layers that may have waited are ignored, if there
are other layers of their kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from rlx.offload.autotune.layer_profile import BackwardWindow, LayerProfile
from rlx.offload.autotune.pass_profile import PassProfile, measured
from rlx.offload.plan.costs import Budget
from rlx.offload.plan.planner import Plan
from rlx.offload.replay.instructions import LayerInstructions

SPREAD = 4  # in a pass one of so many layers is profiled (Note [a device that waits for the host])
Key = tuple[int, int]  # of a bucket: which of the devices in use, and the logarithm of the length


class LengthBucket:
    """The passes of one length, their profile and the plan made from it."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.instructions: dict[int, LayerInstructions] = {}
        self.profile: PassProfile | None = None
        self.is_cached = False  # the profile is that of an earlier run
        self.budget: Budget | None = None  # that ranks have agreed on
        self.passes = 0
        self.last_index = -1  # of the layer called last
        self.call: Mapping[str, Any] = {}  # how the layers were called in the pass that was measured last
        self.is_measuring = False
        self.is_first = False  # what is measured, or waits for the device, is the pass that warms up
        self.backward = BackwardWindow()  # of the pass that was measured last
        self.coming_bytes = 0  # of states that did not exist in that pass
        self.called: set[int] = set()  # layers in that pass
        self.begun: weakref.WeakValueDictionary[int, LayerProfile] = weakref.WeakValueDictionary()
        self.done: dict[int, LayerProfile] = {}
        self._spread_passes: int | None = (
            None  # so many have been measured since (Note [a device that waits for the host])
        )
        self._seen: dict[int, LayerProfile] = {}  # layers of which they have seen the operations

    def sees_calls(self, layer_index: int) -> bool:
        """Whether the operations of a layer are profiled in this pass."""
        return self._spread_passes is None or layer_index % SPREAD == self._spread_passes % SPREAD

    def begin_measuring(
        self, window: BackwardWindow, coming_bytes: int, call: Mapping[str, Any], is_first: bool
    ) -> None:
        """Begin to profile a pass, unless a profiled graph is alive or the device has not passed it."""
        is_alive = any(index not in self.done for index in self.begun)
        self.is_measuring = not is_alive and (not self.called or self.done.keys() != self.called)
        if self.is_measuring:
            self.backward, self.coming_bytes = window, coming_bytes
            self.call, self.is_first = call, is_first
            self.called, self.done = set(), {}
            self.begun.clear()

    def finish(self, sample: LayerProfile) -> None:
        """Note that a layer has been recomputed."""
        if self.begun.get(sample.index) is sample:
            self.done[sample.index] = sample

    def take(self) -> PassProfile | None:
        """Return the profile of a pass, once, when all its layers are through and the device has passed them."""
        if self.profile is not None or not self.called or self.done.keys() != self.called:
            return None
        if not all(sample.is_known for sample in self.done.values()):
            return None
        found, backward = self.done, self.backward
        self.done, self.called, self.is_measuring = {}, set(), False
        self.begun.clear()
        if (
            self._spread_passes is None
            and not self.is_first
            and 2 * sum(s.is_starved for s in found.values()) > len(found)
        ):
            self._spread_passes = 0
            return None
        if self._spread_passes is not None:
            self._spread_passes += 1
            self._seen |= {index: sample for index, sample in found.items() if sample.sees_calls}
            if not self._seen.keys() >= found.keys():
                return None
            found, self._seen, self._spread_passes = self._seen, {}, None
        samples = [found[index] for index in sorted(found)]
        return measured(samples, backward.outside_bytes, backward.turnaround_s)

    def drop(self) -> None:
        """Discard the profile that is waiting for the device."""
        self.called.clear()
        self.done.clear()

    def replan(self) -> None:
        """Discard the plan and keep the profile."""
        self.plan = self.budget = None
