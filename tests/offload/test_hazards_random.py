"""Random numbers in layers: of torch, Python and NumPy, also where the generator's state does not show that they were drawn."""

import random

import numpy
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


class Scaled(nn.Module):
    """Multiplies by a number from one of the generators of the process."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * (4 * float(self.draw()) - 2))


DRAWS = {
    "none": lambda: 0.3,
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: numpy.random.rand(),
    "numpy normal": lambda: (
        numpy.random.randn()
    ),  # draws two and keeps one: the next call changes no word of the generator
    "both": lambda: random.random() + numpy.random.rand() + float(torch.rand(())),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_of_python_and_numpy_are_drawn_again(enable, saving, draw):
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled(DRAWS[draw]) for _ in range(3)))
    x = torch.randn(4, 16)

    def step() -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        loss = model(x).square().sum() + model(x).sum()
        random.random()  # between forward and backward others may draw
        numpy.random.randn()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return list(gradients), [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]

    gradients, drawn_after = step()
    enable(model, layers=["0", "1", "2"], **saving)
    offloaded, drawn_now = step()
    assert drawn_now == drawn_after
    for one, other in zip(offloaded, gradients, strict=True):
        assert torch.equal(one, other)
