"""Layers that draw random numbers and leave no trace of it in the generators' state."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Forked(nn.Module):
    """Sets the state back after it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            y = F.dropout(self.linear(x).tanh(), 0.5)
            attended = F.scaled_dot_product_attention(*[y[:, None]] * 3, dropout_p=0.5)[:, 0]
            return x + F.dropout(attended, 0.5).sin()


@pytest.mark.parametrize("save", ["boundary", "attention"])
@pytest.mark.parametrize("draws_between", [False, True])
def test_numbers_drawn_in_a_fork_are_drawn_again(enable, save, draws_between):
    torch.manual_seed(0)
    model = nn.ModuleList(Forked() for _ in range(3))
    x = torch.randn(4, 5, 16, requires_grad=True)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        y = x
        for layer in model:
            y = layer(y)
        if draws_between:
            torch.rand(5)
        state = torch.get_rng_state()
        grads = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        assert torch.equal(torch.get_rng_state(), state)
        return list(grads)

    plain = step()
    enable(model, layers=["0", "1", "2"], enable_ckpt=True, save=save)
    for grad, expected in zip(step(), plain, strict=True):
        assert torch.equal(grad, expected)
