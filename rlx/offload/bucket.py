"""The passes of one length with `save="auto"`: what is measured in them, and what they follow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rlx.offload.measured import Measurement, measured
from rlx.offload.orders import Orders
from rlx.offload.plan.costs import Machine
from rlx.offload.plan.planner import Plan
from rlx.offload.sample import Backward, Sample

Key = tuple[int, int]  # of a bucket: which of the devices in use, and the logarithm of the length


class Bucket:
    """The passes of one length: what was measured, and the plan made of it."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.orders: dict[int, Orders] = {}
        self.measurement: Measurement | None = None
        self.is_recalled = False  # the measurement is that of an earlier run, and ranks have not agreed on it
        self.first: Measurement | None = None  # what the pass that warms up came to, where no file stands for it
        self.machine: Machine | None = None  # that ranks have agreed on
        self.passes = 0
        self.last_index = -1  # of the layer called last
        self.call: Mapping[str, Any] = {}  # how the layers were called in the pass that was measured last
        self.is_measuring = False
        self.is_first = False  # what is measured, or waits for the device, is the pass that warms up
        self.backward = Backward()  # of the pass that was measured last
        self.coming_bytes = 0  # of states that did not exist in that pass
        self.called: set[int] = set()  # layers in that pass
        self.begun: weakref.WeakValueDictionary[int, Sample] = weakref.WeakValueDictionary()
        self.done: dict[int, Sample] = {}

    def begin_measuring(
        self, coming_bytes: int, gradient_bytes: Callable[[], int], call: Mapping[str, Any], is_first: bool
    ) -> None:
        """Begin to measure, unless a graph that was measured is alive, or the device has not passed it."""
        is_alive = any(index not in self.done for index in self.begun)
        self.is_measuring = not is_alive and (not self.called or self.done.keys() != self.called)
        if self.is_measuring:
            self.backward, self.coming_bytes = Backward(gradient_bytes), coming_bytes
            self.call, self.is_first = call, is_first
            self.called, self.done = set(), {}
            self.begun.clear()

    def finish(self, sample: Sample) -> None:
        """Note that a layer has been recomputed."""
        if self.begun.get(sample.index) is sample:
            self.done[sample.index] = sample

    def take(self) -> Measurement | None:
        """What has been measured, once all that was called has been and the device has passed it; once."""
        if self.measurement is not None or not self.called or self.done.keys() != self.called:
            return None
        if not all(sample.is_known for sample in self.done.values()):
            return None
        samples, backward = [self.done[i] for i in sorted(self.done)], self.backward
        self.drop()
        self.is_measuring = False
        self.begun.clear()
        return measured(samples, backward.outside_bytes, backward.turn_s)

    def drop(self) -> None:
        """Wait no longer for what was measured."""
        self.called.clear()
        self.done.clear()

    def replan(self) -> None:
        """Forget what is followed, and not what was measured."""
        self.plan = self.machine = None
