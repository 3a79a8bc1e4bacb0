"""Ranks that differ in speed, in what they may hold and in the lengths that they see, and agree on plans."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from rlx.offload import OffloadOptions, enable_activation_offloading
from rlx.offload.autotune.layer_profile import LayerProfile

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


def enable(budgets, blocks=3, folder=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(Slow() for _ in range(blocks)))
    budget = budgets[dist.get_rank()]
    options = OffloadOptions(save="auto", min_bytes=0, max_device_bytes=budget, cache_directory=folder)
    return model, enable_activation_offloading(model, True, options)


def passed(model, tokens):
    x = model[0](torch.linspace(-1, 1, tokens * WIDTH).sin().view(1, tokens, WIDTH))
    for layer in model[1]:
        x = layer(x)
    x.square().mean().backward()


def plans(budgets, measured, planned):
    """Plans of the lengths `planned` after passes of those that `measured` names for each rank, and after a tighter limit."""
    model, handle = enable(budgets)
    handle.agree()
    for tokens in measured[dist.get_rank()]:
        passed(model, tokens)
        assert handle.plan() is None, "plans are made where all ranks meet only"
    found = []
    for step in range(2):
        handle.agree()
        for tokens in planned:
            passed(model, tokens)
            found.append(handle.plan())
        if step == 0:
            handle.limit_device_bytes(0)
    return found


def planned_alone(budgets):
    """Two passes of one length without agreement, then with it."""
    model, handle = enable(budgets)
    for _ in range(3):
        passed(model, 6)
    alone = handle.plan()
    handle.agree()
    passed(model, 6)
    return alone, handle.plan()


def first_rank_comes_late(folder):
    """Files in the cache after agreements between which the first rank calls no layers, but for the last ones."""
    model, handle = enable((10_000, 20_000), folder=folder)
    for step in range(6):
        handle.agree()
        if dist.get_rank() == 1 or step >= 3:
            passed(model, 6)
    handle.agree()
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def with_files(folders, tokens, rounds=2):
    """Plans of passes, each rank with a folder of its own, and how many layer calls were measured in each round.

    A round is an agreement and a pass of each length; the first one has only the first length.
    """
    model, handle = enable((10_000, 20_000), folder=folders[dist.get_rank()])
    follow, samples = handle.runner.decide, []

    def note(*call):
        orders = follow(*call)
        samples.extend([orders] if isinstance(orders, LayerProfile) else [])
        return orders

    handle.runner.decide = note
    plans, counts = [], []
    for number in range(rounds):
        handle.agree()
        for length in tokens if number else tokens[:1]:
            passed(model, length)
            plans.append(handle.plan())
        counts.append(len(samples))
        samples.clear()
    handle.disable()
    return plans, counts


def sharded_windows():
    """Whether the profile of a pass counts what FSDP2 holds: of a model without FSDP2, and of one with it."""
    found = []
    for is_sharded in (False, True):
        model, handle = enable((0, 0))
        if is_sharded:
            for layer in model[1]:
                fully_shard(layer)
        for _ in range(3):
            passed(model, 6)
        assert handle.plan() is not None
        state = handle._controller._last.state
        found.append((state.is_sharded, state.in_backward._sharding_bytes))
        handle.disable()
    return found
