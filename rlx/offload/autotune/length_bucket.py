"""The passes of one length with `save="auto"`: what is measured in them, and what they follow.

Note [a device that waits for the host]
To look at each operation takes the host about as long as a device takes for a layer of a few thousand tokens. A device that
has to wait for that makes operations look dear, the small ones most. So where most layers of a pass may have waited, the
operations of every fourth layer only are looked at in the next pass, those of the next ones in the one after, and so on until
all have been: the host gets ahead in the layers between. Layers that may have waited do not count for times in either case, if
there are others of their kind.
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

SPREAD = 4  # of so many layers one is looked at in a pass (Note [a device that waits for the host])
Key = tuple[int, int]  # of a bucket: which of the devices in use, and the logarithm of the length


class LengthBucket:
    """The passes of one length: what was measured, and the plan made of it."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.orders: dict[int, LayerInstructions] = {}
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
        """Whether the operations of a layer are to be looked at in the pass that is measured."""
        return self._spread_passes is None or layer_index % SPREAD == self._spread_passes % SPREAD

    def begin_measuring(
        self, window: BackwardWindow, coming_bytes: int, call: Mapping[str, Any], is_first: bool
    ) -> None:
        """Begin to measure, unless a graph that was measured is alive, or the device has not passed it."""
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
        """What has been measured, once all that was called has been and the device has passed it; once."""
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
        """Wait no longer for what was measured."""
        self.called.clear()
        self.done.clear()

    def replan(self) -> None:
        """Forget what is followed, and not what was measured."""
        self.plan = self.budget = None
