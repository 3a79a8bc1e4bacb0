"""A model on a machine: what its steps cost, what fits, and how long a context may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlx.offload.plan.hardware import DEVICE_SHARE, Hardware
from rlx.offload.plan.model_costs import Decoder, head_cost, layer_cost, state_bytes
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.step import LayerCost, LayerPlan, Machine, predict

STEP_TOKENS = 1024  # to which the longest context is found
_FIXED = {
    "plain": LayerPlan(keep=True),
    "checkpointing": LayerPlan(boundary_leaves=False),
    "inputs to the host": LayerPlan(),
}
MODES = (*_FIXED, "auto")


class Setting(NamedTuple):
    """What is planned for.

    Args:
        decoder, hardware: which.
        gpus: over which FSDP cuts weights, gradients and optimizer states.
        weight_bytes: of each of these for one weight; the optimizer has two states.
        sequences: of equal length in a micro-batch.
        logit_tokens: for how many tokens logits are computed; None: for all.
        states_bytes: of weights, gradients and optimizer states on the device; None: all of them, cut over `gpus`.
        disk_bytes_per_s: of a disk for what the host has no room for; 0: there is none.
    """

    decoder: Decoder
    hardware: Hardware
    gpus: int = 1
    weight_bytes: int = 4
    sequences: int = 1
    logit_tokens: int | None = None
    states_bytes: float | None = None
    disk_bytes_per_s: float = 0.0

    @property
    def memory_parts(self) -> dict[str, float]:
        """What takes device memory beside activations, and what is left for them [bytes]; below 0: it does not fit."""
        whole = self.hardware.device_bytes
        parts: dict[str, float] = state_bytes(self.decoder, self.gpus, self.weight_bytes)._asdict()
        if self.states_bytes is not None:
            parts = {"states": self.states_bytes, "gathered": parts["gathered"]}
        parts["reserve"] = whole * (1 - DEVICE_SHARE)
        return {**parts, "activations": whole - sum(parts.values())}

    @property
    def machine(self) -> Machine:
        """What there is to spend on activations."""
        link, room = self.hardware.link_bytes_per_s, self.memory_parts["activations"]
        return Machine(link, link, max(0, int(room)), int(self.hardware.host_bytes), self.disk_bytes_per_s)

    def costs(self, tokens: int) -> list[LayerCost]:
        """Of each layer, and of the head as the last where logits are computed."""
        layers = range(len(self.decoder.windows))
        costs = [layer_cost(self.decoder, i, tokens, self.hardware, self.sequences) for i in layers]
        logits = tokens if self.logit_tokens is None else min(tokens, self.logit_tokens)
        return [*costs, head_cost(self.decoder, logits, self.hardware)] if logits else costs

    def plan(self, mode: str, tokens: int) -> Plan:
        """What is done with so many tokens in one of `MODES`, and what is expected of it."""
        costs, machine = self.costs(tokens), self.machine
        if mode == "auto":
            return make_plan(costs, machine)
        layers = (_FIXED[mode],) * len(costs)
        return Plan(layers, False, predict(costs, layers, False, machine))

    def fits(self, plan: Plan) -> bool:
        """Whether device and host have room for it."""
        machine = self.machine
        has_room = machine.host_bytes is None or plan.prediction.host_bytes <= machine.host_bytes
        return has_room and self.memory_parts["activations"] >= plan.prediction.peak_bytes

    def longest(self, mode: str) -> int:
        """The most tokens that fit in a mode, to `STEP_TOKENS`."""
        return STEP_TOKENS * _last(lambda steps: self.fits(self.plan(mode, STEP_TOKENS * steps)))


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
