"""AdamW on the shards of this process.

torch's AdamW would step the DTensors of FSDP2. An operation on a DTensor looks up its layout in caches that have no limit and
whose keys hold the operation's numbers. AdamW's numbers differ in each step, because they hold powers of its betas, so the caches
grew with every step: by 17 kB for a model of 0.1 MB (torch 2.11). A shard is a plain tensor, which needs no layout.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from rlx.engine.units import local


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
