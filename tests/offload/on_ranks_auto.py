"""Ranks that differ in speed and in what they may hold."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rlx.offload import OffloadOptions, enable_activation_offloading

WIDTH = 16


class Slow(nn.Module):
    """A layer whose second rank takes longer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        time.sleep(0.002 * dist.get_rank())
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


def enable(budgets, blocks=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(Slow() for _ in range(blocks)))
    options = OffloadOptions(save="auto", min_bytes=0, max_device_bytes=budgets[dist.get_rank()])
    return model, enable_activation_offloading(model, True, options)


def passed(model, tokens):
    x = model[0](torch.linspace(-1, 1, tokens * WIDTH).sin().view(1, tokens, WIDTH))
    for layer in model[1]:
        x = layer(x)
    x.square().mean().backward()


def planned(budgets):
    """The plan, and what all gradients add up to."""
    model, handle = enable(budgets)
    for _ in range(4):
        passed(model, 6)
    return handle.plan(), [parameter.grad.sum().item() for parameter in model.parameters()]
