"""AdamW on the shards of this process; bf16 and fp16 weights may have fp32 masters.

torch's AdamW would step the DTensors of FSDP2. An operation on a DTensor looks up its layout in caches that have no limit and
whose keys hold the operation's numbers. AdamW's numbers differ in each step, because they hold powers of its betas, so the caches
grew with every step: by 17 kB for a model of 0.1 MB (torch 2.11). A shard is a plain tensor, which needs no layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.adamw import adamw

from rlx.engine.fsdp_units import local


class ShardAdamW(AdamW):
    """AdamW with the same state and, bit for bit, the same steps.

    Attributes:
        state_dtype: of the moments; None: the parameters'.
    """

    state_dtype: torch.dtype | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the parameters that have gradients."""
        assert closure is None
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            self.step_group(group, trained, [self.state_of(p) for p in trained])

    def step_group(self, group: dict[str, Any], trained: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """Step parameters of a group with their states; all have gradients."""
        step_shards(group, [local(p) for p in trained], [local(p.grad) for p in trained], states)

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state, a new one before its first step."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter))
        return state

    @torch.no_grad()
    def new_state(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the state before the first step by name, each tensor made when it is asked for."""
        is_fused = any(group["fused"] for group in self.param_groups)
        # The fused kernel reads the count on the device.
        yield "step", torch.zeros((), dtype=torch.float32, device=local(parameter).device if is_fused else None)
        for name in ("exp_avg", "exp_avg_sq"):
            yield name, torch.zeros_like(parameter, dtype=self.state_dtype, requires_grad=False)


def step_shards(
    group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], states: Sequence[dict[str, Tensor]]
) -> None:
    """Step weights, which are shards, with the options of a group of AdamW's parameters; the states may be DTensors."""
    moments, squares = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
    adamw(
        weights,
        gradients,
        moments,
        squares,
        [],
        [state["step"] for state in states],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


MASTER = "master"
NARROW = (torch.bfloat16, torch.float16)


class MasterAdamW(ShardAdamW):
    """AdamW whose state has, besides both moments, an fp32 master of each bf16 or fp16 parameter.

    At the learning rates of RL an update is smaller than half the distance between two bf16 numbers. A bf16 weight of 0.02 changes
    in steps of 1.2e-4, and AdamW with lr 1e-6 asks for 1e-6: rounding to nearest returns the old weight. A master copy in fp32 sums
    such updates until the bf16 weight moves. The model computes with the bf16 weight, which is the master rounded to nearest.

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
