"""AdamW on fp32 master copies of bf16 parameters.

At the learning rates of RL an update is smaller than half the distance between two bf16 numbers. A bf16 weight of 0.02 changes in
steps of 1.2e-4, and AdamW with lr 1e-6 asks for 1e-6: rounding to nearest returns the old weight. A master copy in fp32 sums such
updates until the bf16 weight moves. The model computes with the bf16 weight, which is the master rounded to nearest.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlx.engine.shard_adamw import ShardAdamW, step_shards
from rlx.engine.units import local

MASTER = "master"
NARROW = (torch.bfloat16, torch.float16)


class MasterAdamW(ShardAdamW):
    """AdamW whose state has, besides both moments, an fp32 master of each parameter.

    A step equals AdamW's on the masters with the same gradients in fp32, bit for bit: gradients are widened first, then clipped.
    The state of a parameter holds `step`, `exp_avg`, `exp_avg_sq` and `master`, all fp32, sharded like the parameter.

    Args:
        parameters: bf16 or fp16 (shards); wider ones need no master.
        options: of AdamW: lr, betas, eps, weight_decay, fused.

    Attributes:
        gradient_scale: factor of all gradients in the next step, for clipping.
    """

    state_dtype = torch.float32

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any):
        super().__init__(parameters, **options)
        self.gradient_scale = 1.0

    def step_group(self, group: dict[str, Any], trained: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """Step the masters, then round them to the parameters."""
        masters = [local(state[MASTER]) for state in states]
        step_shards(group, masters, [self._widened(local(p.grad)) for p in trained], states)
        for parameter, master in zip(trained, masters, strict=True):
            local(parameter).copy_(master)

    def _widened(self, gradient: Tensor) -> Tensor:
        wide = gradient.float()
        if self.gradient_scale == 1.0:
            return wide
        return wide * self.gradient_scale if wide is gradient else wide.mul_(self.gradient_scale)

    @torch.no_grad()
    def new_state(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As ShardAdamW.new_state; the master is last."""
        yield from super().new_state(parameter)
        yield MASTER, parameter.detach().to(torch.float32, copy=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state and keep its fp32 numbers, which torch's optimizers would round to the parameters' type."""
        super().load_state_dict(dict(state_dict))
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(device=parameter.device, dtype=torch.float32, copy=True)
