"""A model on a machine: what its steps cost, what fits, and how long a context may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.hardware import DEVICE_SHARE, Hardware
from rlx.offload.plan.memory import StateBytes, forward_bytes, head_forward_bytes, state_bytes, step_bytes
from rlx.offload.plan.model_costs import E, head_cost, layer_cost
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import predict

STEP_TOKENS = 1024  # to which the longest context is found
_ATTENTION = {"q", "k", "v", "attention", "o"}
PLANNED_MODES = ("plain", "checkpointing", "inputs to the host", "auto")


class Phases(NamedTuple):
    """The most that a device holds in each phase of a training step, gradients always counted [bytes]."""

    forward: float
    head: float
    backward: float
    step: float


class Scenario(NamedTuple):
    """What is planned for.

    Args:
        decoder, hardware: which.
        gpus: over which FSDP cuts weights, gradients and optimizer states.
        weight_bytes: of each of these for one weight; the optimizer has two states.
        sequences: of equal length in a micro-batch.
        logit_tokens: for how many tokens log-probs are computed; None: for all.
        states: of weights, gradients and optimizer states on the device; None: all of them, cut over `gpus`. Or their bytes.
        is_head_trained: the head has a gradient.
        other_bytes: that others hold on the device meanwhile.
        disk_bytes_per_s: of a disk for what the host has no room for; 0: there is none.
        tile: tokens of a tile of MLPs and norms; None: there are no tiles; 0: as many as rlx takes.
        shared_by: accelerators that share each sequence.
        optimizer_on_host: its state waits there but for the step.
        element: bytes of an element of activations.
    """

    decoder: Decoder
    hardware: Hardware
    gpus: int = 1
    weight_bytes: int = 4
    sequences: int = 1
    logit_tokens: int | None = None
    states: StateBytes | float | None = None
    is_head_trained: bool = True
    other_bytes: float = 0.0
    disk_bytes_per_s: float = 0.0
    tile: int | None = None
    shared_by: int = 1
    optimizer_on_host: bool = False
    element: int = E

    @property
    def _states(self) -> StateBytes:
        whole = state_bytes(self.decoder, self.gpus, self.weight_bytes, self.element)
        if isinstance(self.states, float | int):
            return StateBytes(self.states, 0.0, 0.0, whole.gathered)
        return self.states or whole

    @property
    def memory_parts(self) -> dict[str, float]:
        """What takes device memory beside activations, and what is left for them [bytes]; below 0: it does not fit."""
        whole, states = self.hardware.device_bytes, self._states
        parts: dict[str, float] = states._asdict()
        if isinstance(self.states, float | int):
            parts = {"states": self.states, "gathered": states.gathered}
        elif self.optimizer_on_host:
            del parts["optimizer"]
        if self.other_bytes:
            parts["others"] = self.other_bytes
        parts["reserve"] = whole * (1 - DEVICE_SHARE)
        return {**parts, "activations": whole - sum(parts.values())}

    @property
    def machine(self) -> Budget:
        """What there is to spend on activations."""
        link, room = self.hardware.link_bytes_per_s, self.memory_parts["activations"]
        return Budget(link, link, max(0, int(room)), max(0, int(self.host_bytes)), self.disk_bytes_per_s)

    @property
    def host_bytes(self) -> float:
        """Of host memory for activations; below 0: there is not even room for the optimizer's state."""
        return self.hardware.host_bytes - self._states.optimizer * self.optimizer_on_host

    def costs(self, tokens: int) -> list[LayerCost]:
        """Of each layer, and of the head as the last where log-probs are computed."""
        kinds: dict[tuple[int | None, bool], LayerCost] = {}
        costs = []
        for i, kind in enumerate(zip(self.decoder.windows, self.decoder.sparse, strict=True)):
            if kind not in kinds:
                kinds[kind] = layer_cost(
                    self.decoder,
                    i,
                    tokens,
                    self.hardware,
                    self.sequences,
                    tile=self.tile,
                    shared_by=self.shared_by,
                    element=self.element,
                )
            costs.append(kinds[kind])
        logits = self._own_logits(tokens)
        head = head_cost(self.decoder, logits, self.hardware, self.element, self.is_head_trained) if logits else None
        return costs if head is None else [*costs, head]

    def _own_logits(self, tokens: int) -> int:
        """For how many tokens one accelerator computes log-probs."""
        logits = tokens if self.logit_tokens is None else min(tokens, self.logit_tokens)
        return -(-logits // self.shared_by)

    def plan(self, mode: str, tokens: int) -> Plan:
        """What is done with so many tokens in one of `PLANNED_MODES`, or as `save="attention"` or `"all"` do it, and what to expect."""
        costs, machine = self.costs(tokens), self.machine
        if mode == "auto":
            return make_plan(costs, machine)
        if mode == "all":  # whatever autograd saves leaves; there is nothing to recompute
            costs = [replace(cost, boundary_bytes=cost.saved_bytes, recompute_s=0.0) for cost in costs]
        layers = tuple(_of_mode(mode, cost) for cost in costs)
        # Those ask for what a layer needs late in the backward of the one behind it.
        return Plan(layers, (1,) * len(costs), predict(costs, layers, replace(machine, device_bytes=0)))

    def phases(self, plan: Plan) -> Phases:
        """Device memory by phase."""
        states, (forward, last, backward) = self._states, plan.prediction.peaks
        if self.logit_tokens == 0:
            backward, last = max(last, backward), 0
        base = states.weights + states.gradients + self.other_bytes
        while_passing = base + states.gathered + states.optimizer * (not self.optimizer_on_host)
        head = while_passing + last if last else 0.0
        step = base + step_bytes(states, self.optimizer_on_host)
        return Phases(while_passing + forward, head, while_passing + backward, step)

    def without_backward(self, tokens: int) -> float:
        """The most that a device holds while so many tokens go forward only, gradients not counted [bytes]."""
        states, own = self._states, -(-tokens // self.shared_by)
        working = max(
            forward_bytes(self.decoder, layer, own, self.element, self.tile)
            for layer in {sparse: layer for layer, sparse in enumerate(self.decoder.sparse)}.values()
        )
        head = head_forward_bytes(self.decoder, self._own_logits(tokens), self.element)
        held = states.weights + states.gathered + states.optimizer * (not self.optimizer_on_host) + self.other_bytes
        return held + max(working, head)

    def fits(self, plan: Plan) -> bool:
        """Whether device and host have room for it."""
        has_room = plan.prediction.host_bytes <= self.host_bytes
        return has_room and max(self.phases(plan)) <= self.hardware.device_bytes * DEVICE_SHARE

    def longest(self, mode: str) -> int:
        """The most tokens that fit in a mode, to `STEP_TOKENS`."""
        return STEP_TOKENS * _last(lambda steps: self.fits(self.plan(mode, STEP_TOKENS * steps)))


def _of_mode(mode: str, cost: LayerCost) -> LayerPlan:
    if mode == "attention":
        return LayerPlan(off_device=frozenset(i for i, op in enumerate(cost.operations) if op.name in _ATTENTION))
    return LayerPlan(keep=mode == "plain", offload_boundary=mode != "checkpointing")


def _last(holds: Callable[[int], bool]) -> int:
    """The last number for which something holds that holds up to it."""
    above = 1
    while holds(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below
