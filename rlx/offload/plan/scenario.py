"""A model on a machine: the cost of its steps, whether they fit, and the longest context that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from rlx.offload.plan.costs import Budget, LayerCost, LayerPlan
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.hardware import DEVICE_SHARE, Hardware
from rlx.offload.plan.memory import StateBytes, forward_bytes, head_forward_bytes, state_bytes, step_bytes
from rlx.offload.plan.model_costs import E, head_cost, layer_cost
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import predict

STEP_TOKENS = 1024  # the longest context is found to a multiple of this
_ATTENTION = {"q", "k", "v", "attention", "o"}
PLANNED_MODES = ("plain", "checkpointing", "boundary", "attention", "auto")


class Phases(NamedTuple):
    """Peak device memory of each phase of a training step, always with gradients [bytes]."""

    forward: float
    head: float
    backward: float
    step: float


class Scenario(NamedTuple):
    """A model on a machine: the figures that determine plans."""

    decoder: Decoder
    hardware: Hardware
    gpus: int = 1  # number of GPUs that FSDP shards weights, gradients and optimizer states over
    weight_bytes: int = 4  # size of a weight, of its gradient and of each of its two optimizer states
    sequences: int = 1  # in a micro-batch, of equal length
    logit_tokens: int | None = None  # number of tokens for which log-probs are computed; None: all
    # Weights, gradients and optimizer states on the device, by parts or as one number of bytes; None: by formulas, over `gpus`.
    states: StateBytes | float | None = None
    is_head_trained: bool = True  # the head has a gradient
    other_bytes: float = 0.0  # device memory that other users hold during the step
    disk_bytes_per_s: float = 0.0  # rate of a disk for bytes that the host has no room for; 0: no disk
    tile: int | None = None  # tokens per tile of MLPs and norms; None: no tiles; 0: as `enable_tiling` chooses
    shared_by: int = 1  # number of accelerators that share each sequence
    optimizer_on_host: bool = False  # except during its step
    element: int = E  # size of an element of activations [bytes]

    @property
    def _states(self) -> StateBytes:
        whole = state_bytes(self.decoder, self.gpus, self.weight_bytes, self.element)
        if isinstance(self.states, float | int):
            return StateBytes(self.states, 0.0, 0.0, whole.gathered)
        return self.states or whole

    @property
    def memory_parts(self) -> dict[str, float]:
        """Device memory by use [bytes]. `"activations"` is the rest of it, below 0 if the other parts do not fit."""
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
    def budget(self) -> Budget:
        """The budget for activations."""
        link, room = self.hardware.link_bytes_per_s, self.memory_parts["activations"]
        return Budget(link, link, max(0, int(room)), max(0, int(self.host_bytes)), self.disk_bytes_per_s)

    @property
    def host_bytes(self) -> float:
        """Host memory for activations; below 0 if the host has no room for the optimizer's states."""
        return self.hardware.host_bytes - self._states.optimizer * self.optimizer_on_host

    def costs(self, tokens: int) -> list[LayerCost]:
        """Return the cost of each layer and, if log-probs are computed, of the head as a last layer."""
        how: dict[str, Any] = {"tile": self.tile, "shared_by": self.shared_by, "element": self.element}
        kinds = list(zip(self.decoder.windows, self.decoder.sparse, strict=True))
        of_kind = {
            kind: layer_cost(self.decoder, kinds.index(kind), tokens, self.hardware, self.sequences, **how)
            for kind in set(kinds)
        }
        costs = [of_kind[kind] for kind in kinds]
        if logits := self._own_logits(tokens):
            costs.append(head_cost(self.decoder, logits, self.hardware, self.element, self.is_head_trained))
        return costs

    def _own_logits(self, tokens: int) -> int:
        """Return the number of tokens for which one accelerator computes log-probs."""
        logits = tokens if self.logit_tokens is None else min(tokens, self.logit_tokens)
        return -(-logits // self.shared_by)

    def plan(self, mode: str, tokens: int) -> Plan:
        """Return the plan for a number of tokens in one of `PLANNED_MODES`, or in mode `"all"`."""
        costs, budget = self.costs(tokens), self.budget
        if mode == "auto":
            return make_plan(costs, budget)
        if mode == "all":  # every saved tensor is offloaded, nothing is recomputed
            costs = [replace(cost, boundary_bytes=cost.saved_bytes, recompute_s=0.0) for cost in costs]
        layers = tuple(_of_mode(mode, cost) for cost in costs)
        # These modes fetch a layer late in the backward of the layer after it.
        return Plan(layers, (1,) * len(costs), predict(costs, layers, replace(budget, device_bytes=0)))

    def phases(self, plan: Plan) -> Phases:
        """Return the device memory by phase."""
        states, (forward, last, backward) = self._states, plan.prediction.peaks
        if self.logit_tokens == 0:
            backward, last = max(last, backward), 0
        passing = self._held_while_passing + states.gradients
        step = states.weights + states.gradients + self.other_bytes + step_bytes(states, self.optimizer_on_host)
        return Phases(passing + forward, passing + last if last else 0.0, passing + backward, step)

    @property
    def _held_while_passing(self) -> float:
        """Device memory during forward and backward, without activations and gradients [bytes]."""
        states = self._states
        return states.weights + states.gathered + states.optimizer * (not self.optimizer_on_host) + self.other_bytes

    def without_backward(self, tokens: int) -> float:
        """Return the peak device memory of a forward without backward and without gradients [bytes]."""
        one_of_each = {sparse: layer for layer, sparse in enumerate(self.decoder.sparse)}.values()
        own = -(-tokens // self.shared_by)
        working = [forward_bytes(self.decoder, layer, own, self.element, self.tile) for layer in one_of_each]
        head = head_forward_bytes(self.decoder, self._own_logits(tokens), self.element)
        return self._held_while_passing + max(*working, head)

    def fits(self, plan: Plan) -> bool:
        """Return whether device and host have room for a plan."""
        has_room = plan.prediction.host_bytes <= self.host_bytes
        return has_room and max(self.phases(plan)) <= self.hardware.device_bytes * DEVICE_SHARE

    def longest(self, mode: str) -> int:
        """Return the largest multiple of `STEP_TOKENS` tokens that fits in a mode."""
        return STEP_TOKENS * _last(lambda steps: self.fits(self.plan(mode, STEP_TOKENS * steps)))


def _of_mode(mode: str, cost: LayerCost) -> LayerPlan:
    if mode == "attention":
        return LayerPlan(off_device=frozenset(i for i, op in enumerate(cost.operations) if op.name in _ATTENTION))
    return LayerPlan(keep=mode == "plain", offload_boundary=mode != "checkpointing")


def _last(holds: Callable[[int], bool]) -> int:
    """Return the largest number for which a property holds; it must also hold for all smaller numbers."""
    above = 1
    while holds(above):
        above *= 2
    return bisect_left(range(above), True, lo=above // 2 + 1, key=lambda number: not holds(number)) - 1
