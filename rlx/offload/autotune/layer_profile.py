"""The profile of one layer call: times, bytes and operations of its forward and backward, with its inputs offloaded.

Times come from device events, which are read after the device has passed them. Bytes come from torch's allocator; its peak is
reset at each layer of a profiled pass.

Note [what a layer is charged with]
A budget limits the memory that a step adds to what exists before its layers begin, apart from the gradients it makes. So a layer
is charged with its own peak, in forward or in backward. It is also charged with the other memory that exists then and that no
plan can change: rotary tables and masks, the first layer's inputs if the model keeps them, the memory of the head and the loss,
and the gradient of the layer's output. It is not charged with memory of other layers that depends on the plan: inputs that are
still being copied to the host, and prefetched inputs.

Note [what FSDP2 holds during a step]
FSDP2 holds memory that no plan can change, so a budget must cover it. In the backward of a layer it has four parts: the gathered
parameters of the layer, those of the layer before (prefetched), the layer's gradients before they are reduced, and the buffer
that reduces the gradients of the layer after it. With Qwen2-7B in bf16 each of the four is 0.47 GB. Parameters of the first layer
are already gathered when that layer begins. They are subtracted from the memory that exists before it, so that gathered
parameters are charged to all layers. The buffer does not exist in the last layer. So each other layer compares the memory when its
backward begins with the memory when the backward of the last layer began. Gradients of gathered parameters are freed within the
pass: the layer is charged with them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rlx.offload.autotune.op_profile import DeviceMemoryProbe, Inputs, OpProfile, is_passed, seconds
from rlx.offload.replay.dataflow import Dataflow
from rlx.offload.storage.regions import is_parameter, is_plain
from rlx.offload.storage.stats import Mark, mark


@dataclass
class PassState:
    """Figures that the layers of one pass share: the layer whose backward runs, and memory outside of layers."""

    gradient_bytes: Callable[[], int] = lambda: 0  # returns the memory of all existing gradients that outlast the pass
    is_sharded: bool = False  # FSDP2 gathers and frees parameters in the pass (Note [what FSDP2 holds during a step])
    gathered_bytes: int = 0  # memory of the parameters that FSDP2 has gathered when the first layer begins
    pending_bytes: int = 0  # of states that do not exist in the pass
    is_warm_up: bool = False  # kernels are chosen and memory is allocated in it, so its times do not count
    begun: WeakValueDictionary[int, LayerProfile] = field(default_factory=WeakValueDictionary)  # by index
    called: set[int] = field(default_factory=set)  # indices of the layers that have begun
    done: dict[int, LayerProfile] = field(default_factory=dict)  # those that were recomputed
    in_backward: LayerProfile | None = None
    last_boundary_bytes: int | None = None  # inputs of the layer whose forward began last
    has_begun: bool = False  # backward
    baseline_bytes: int = 0  # allocated when the first layer begins, apart from its inputs and gathered parameters
    other_bytes: int = 0  # memory of no layer when backward begins (Note [what a layer is charged with])
    loss_bytes: int = 0  # peak while the head and the loss run, `other_bytes` included
    begin_gradient_bytes: int = 0
    turn: tuple[Mark, Mark] | None = None  # end of the layers' forward, begin of their backward

    @property
    def loss_s(self) -> float:
        """Time between forward and backward of the layers, in which the head and the loss run."""
        return 0.0 if self.turn is None else seconds(*self.turn)

    @property
    def is_complete(self) -> bool:
        """Whether all layers that have begun were recomputed."""
        return bool(self.called) and self.done.keys() == self.called

    @property
    def is_alive(self) -> bool:
        """Whether the graph of a layer that was not recomputed is alive."""
        return any(index not in self.done for index in self.begun)

    def begin(self, layer: LayerProfile) -> None:
        """Note that the profile of a layer has begun."""
        self.called.add(layer.index)
        self.begun[layer.index] = layer

    def clear(self) -> None:
        """Forget the layers."""
        self.called.clear()
        self.begun.clear()
        self.done.clear()

    def made_bytes(self) -> int:
        """Return the memory of gradients that this pass has made so far."""
        return self.gradient_bytes() - self.begin_gradient_bytes


class LayerProfile:
    """Profiles one layer call.

    Args:
        index: of the layer.
        device: where it computes.
        inputs: sizes of the tensors that it is called with.
        state: shared by the layers of a pass.
        min_bytes: smaller tensors are not offloaded.
        memory: reads the device's memory; None: from torch.
        gradient_bytes: returns the memory of the existing gradients of the layer's parameters that outlast the pass.
        sees_calls: profile each operation (`profiler.py`); else only the begin and end of the layer, which takes the host no time.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        inputs: Inputs,
        state: PassState,
        min_bytes: int = 1,
        memory: DeviceMemoryProbe | None = None,
        gradient_bytes: Callable[[], int] = lambda: 0,
        sees_calls: bool = True,
    ) -> None:
        self.index = index
        self.inputs = inputs
        self.min_bytes = max(min_bytes, 1)
        self.sees_calls = sees_calls
        self.is_host_bound = False  # the device may have waited for the host, so that times are the host's
        self.calls: list[OpProfile] = []  # linear maps and attention
        self.others: list[OpProfile] = []  # all other operations
        self.flow: Dataflow | None = None
        self.saved_bytes = self.forward_bytes = 0
        self.extra_bytes = 0  # of the inputs that autograd does not save
        self.working_bytes: int | None = None
        self.late_bytes: int | None = None
        self._device, self._state = device, state
        self._memory = memory or DeviceMemoryProbe(device)
        self._marks: dict[str, Mark] = {}
        self._base_bytes = self._offloading_bytes = 0
        # Backward asks for slots in falling order. A threshold is a slot; backward passes it with the first slot below it.
        self._thresholds_left: list[int] = []
        self._middle = 0  # the threshold from which on backward fetches
        self._passed: dict[int, tuple[Mark, int]] = {}  # by threshold: when it was passed, peak memory before it
        self._rest_bytes = 0  # peak memory after the last threshold
        self._gradient_bytes = gradient_bytes
        self._had_bytes = 0  # of the gradients that existed when backward came to the layer
        self._made_bytes = 0  # of gradients made until the last threshold
        self._sharding_bytes = 0  # memory of FSDP2, in addition to that when backward began

    def mark(self) -> Mark:
        """Return the present point in time on the device."""
        return mark(None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device))

    def begin_forward(self) -> None:
        """The layer's forward begins, and its inputs are being copied out."""
        state = self._state
        if state.last_boundary_bytes is None:
            tables = sum(self.inputs.shared.values())  # they are made in this step, too
            inputs = self.inputs.boundary_bytes + tables
            state.baseline_bytes = max(0, self._memory.look()[0] - inputs - state.gathered_bytes)
            state.begin_gradient_bytes = state.gradient_bytes()
        self._offloading_bytes = state.last_boundary_bytes or 0
        state.last_boundary_bytes = self.inputs.boundary_bytes
        self._memory.reset()
        self._marks["forward"] = self.mark()

    def pass_forward(self) -> None:
        """The layer's forward has ended."""
        self._marks["forward_end"] = self.mark()
        self._note_host_bound("forward")

    def _note_host_bound(self, begin: str) -> None:
        # The host has issued the whole layer. If the device has already begun it, the device is less than a layer behind. It
        # has waited for the host, or was busy with the operations just before; the two cases cannot be told apart.
        self.is_host_bound = self.is_host_bound or is_passed(self._marks[begin])

    def end_forward(self, saved: Sequence[Tensor], is_cacheable: Sequence[bool], flow: Dataflow | None) -> None:
        """The layer's forward has ended: autograd has `saved` tensors, and the results of some `calls` can be cached."""
        self.pass_forward()
        for call, can_be in zip(self.calls, is_cacheable, strict=True):
            call.is_cacheable = can_be
        self.flow = flow
        plain = [tensor.untyped_storage() for tensor in saved if is_plain(tensor) and not is_parameter(tensor)]
        storages = {storage.data_ptr(): storage.nbytes() for storage in plain}
        self.saved_bytes = _outside(storages, self.inputs.shared)
        self.extra_bytes = _outside(self.inputs.memory, storages)
        for call in (*self.calls, *self.others):
            call.extra_bytes = _outside(call.storages, storages)
            call.storages.clear()
        cached = sum(call.extra_bytes for call in self.calls)  # a profiled layer holds the results of all calls
        others = self._state.baseline_bytes + self._offloading_bytes + cached
        self.forward_bytes = max(0, self._memory.look()[1] - others)

    def leave_forward(self) -> None:
        """The tensors that the layer's forward has saved are freed."""
        self._memory.reset()

    def begin_recompute(self) -> None:
        """Backward comes to the layer."""
        if "recompute" in self._marks:
            return
        self._marks["recompute"] = now = self.mark()
        state = self._state
        allocated, peak = self._memory.look()
        if state.in_backward is not None:
            state.in_backward.end_backward(now, peak)
        elif not state.has_begun:
            inputs = self.inputs.boundary_bytes + self._offloading_bytes
            state.other_bytes = max(0, allocated - state.baseline_bytes - state.made_bytes() - inputs)
            state.loss_bytes = peak - allocated + state.other_bytes
            state.turn = self._marks["forward_end"], now
            allocated = max(0, allocated - self._offloading_bytes)  # backward now waits until they are copied
        if state.has_begun and state.is_sharded:
            others = allocated - state.baseline_bytes - state.made_bytes() - self.inputs.boundary_bytes
            self._sharding_bytes = max(0, others - state.other_bytes)
        state.has_begun = True
        state.in_backward = self
        self._base_bytes, self._had_bytes = allocated, self._gradient_bytes()
        self._memory.reset()

    def end_recompute(self) -> None:
        """The layer has been recomputed; its backward follows."""
        if "recompute_end" not in self._marks:
            self._marks["recompute_end"] = self.mark()
            self._note_host_bound("recompute")
            if self.index in self._state.begun:  # else nobody waits for the pass any more
                self._state.done[self.index] = self

    def begin_thresholds(self, middle: int) -> int:
        """Begin to note thresholds in backward, which fetches once it is below `middle`. Return the first threshold."""
        self._middle = middle
        if not self._passed:
            self._thresholds_left = sorted({middle, *(call.slots for call in self.calls)} - {0, -1}, reverse=True)
        return self._thresholds_left[0] if self._thresholds_left else middle

    def pass_threshold(self, slot: int) -> int:
        """Note that backward asks for a slot below a threshold; return the next threshold, 0 if there is none."""
        if self._state.in_backward is not self:
            return self._middle if slot >= self._middle else 0
        below = [threshold for threshold in self._thresholds_left if slot < threshold]
        if below:
            self._passed[below[-1]] = self.mark(), self._segment(self._memory.look()[1])
            self._made_bytes = self._gradient_bytes() - self._had_bytes
            self._memory.reset()
            self._thresholds_left = self._thresholds_left[len(below) :]
        return self._thresholds_left[0] if self._thresholds_left else 0

    def end_backward(self, now: Mark, peak: int) -> None:
        """Backward has come to the layer before."""
        self._marks["backward_end"] = now
        self._rest_bytes = rest = self._segment(peak)
        self.working_bytes = max(rest, 0, *(held for _, held in self._passed.values()))
        self.late_bytes = self.held_from(self._middle)

    def _segment(self, peak: int) -> int:
        """Return the peak since the last threshold. This layer's inputs count; prefetched ones, assumed to be as large, do not."""
        is_fetching = any(threshold <= self._middle for threshold in self._passed)
        charged = peak - self._base_bytes - self._made_bytes + self._state.other_bytes + self._sharding_bytes
        return charged + (0 if is_fetching else self.inputs.boundary_bytes)

    @property
    def thresholds(self) -> list[int]:
        """The thresholds that backward has passed, in that order."""
        return list(self._passed)

    def held_from(self, threshold: int) -> int:
        """Return the peak of backward below a threshold."""
        return max(self._rest_bytes, 0, *(held for at, (_, held) in self._passed.items() if at < threshold))

    def reaches(self, threshold: int) -> float:
        """Return when backward has passed a threshold, as a share of its time, in [0, 1]."""
        share = seconds(self._marks["recompute_end"], self._passed[threshold][0]) / max(self.backward_s or 0.0, 1e-12)
        return min(1.0, share)

    @property
    def is_known(self) -> bool:
        """Whether the device has passed all marks."""
        marks = [*self._marks.values(), *(mark for mark, _ in self._passed.values())]
        marks += [mark for call in (*self.calls, *self.others) for mark in (call.stop, call.stored) if mark is not None]
        return all(isinstance(mark, float) or mark.query() for mark in marks)

    @property
    def forward_s(self) -> float:
        """Time of forward."""
        return seconds(self._marks["forward"], self._marks["forward_end"])

    @property
    def recompute_s(self) -> float:
        """Time of recomputation."""
        return seconds(self._marks["recompute"], self._marks["recompute_end"])

    @property
    def backward_s(self) -> float | None:
        """Time of backward without recomputation; None for the first layer, whose end is not seen."""
        end = self._marks.get("backward_end")
        return None if end is None else seconds(self._marks["recompute_end"], end)

    @property
    def late_at(self) -> float | None:
        """When the peak of backward is over, as a share of its time, in [0, 1]; None if that was not seen."""
        return self.reaches(self._middle) if self._middle in self._passed and self.backward_s is not None else None

    def ends_at(self, call: OpProfile) -> float:
        """Return when a call ended, as a share of forward's time, in [0, 1]."""
        return self._share_of_forward(call.stop)

    def stored_at(self, call: OpProfile) -> float:
        """Return when the result of a call could be offloaded, as a share of forward's time, in [0, 1]."""
        return self._share_of_forward(call.stop if call.stored is None else call.stored)

    def _share_of_forward(self, mark: Mark | None) -> float:
        assert mark is not None
        return min(1.0, seconds(self._marks["forward"], mark) / max(self.forward_s, 1e-12))


def _outside(storages: Mapping[int, int], others: Container[int]) -> int:
    """Return the bytes of those storages, by address, that are not among the others."""
    return sum(nbytes for address, nbytes in storages.items() if address not in others)
