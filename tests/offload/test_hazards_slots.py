"""Recomputed layers: what changes between forward and backward so that other tensors would be saved, or others are meant."""

import pytest
import torch
from torch import nn

from rlx.offload import RecomputeError

RECOMPUTING = [{"enable_ckpt": True, "save": save} for save in ("boundary", "attention")]
recomputing = pytest.mark.parametrize("saving", RECOMPUTING, ids=lambda saving: saving["save"])


class Overwriting(torch.autograd.Function):
    """Its backward uses the memory of what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x.mul_(3)
        return grad * 2


def square_first(block, x):
    h = block.lin(x)
    return torch.tanh(h * h) + Overwriting.apply(h)


def output_first(block, x):
    h = torch.tanh(block.lin(x))
    return h + Overwriting.apply(h)


def whole_first(block, x):
    h = block.lin(x)
    return torch.sin(h).sum() + Overwriting.apply(h[:1]).sum() + x


@pytest.mark.parametrize("min_bytes", [0, 64])
@pytest.mark.parametrize("forward", [square_first, output_first, whole_first])
def test_a_write_in_backward_to_memory_that_was_saved_twice_raises(enable, toys, mode, forward, min_bytes):
    model = toys.of(forward)
    for enabled in (False, True):
        if enabled:
            enable(model, **mode, min_bytes=min_bytes)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            toys.step(model).backward()


def test_a_write_in_backward_to_what_attention_saved_raises(enable, toys, saving):
    """Bytes that came back for an answer are shared by the slots that it fills."""

    def forward(kit, x):
        a = toys.kit.attend(kit, kit.q(x), kit.k(x), kit.v(x))
        return x + torch.tanh(kit.o(Overwriting.apply(a)))

    model = toys.stack(lambda: toys.kit(forward), width=16)
    for enabled in (False, True):
        if enabled:
            enable(model, **saving)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            toys.read(model).backward()


def test_a_write_in_backward_to_the_input_of_two_layers_is_right(compare, toys):
    """The second layer's backward writes to bytes that came back, and of which the first is recomputed."""

    def forward(block, x):
        return torch.tanh(x + 1) * block.lin.bias

    def write(block, x):
        return Overwriting.apply(x) * block.lin.bias

    def step(model):
        x = model.embed(toys.batch())
        return model.head(model.layers[0](x) + model.layers[1](x)).sum()

    model = toys.stack(lambda: None, blocks=0)
    model.layers = nn.ModuleList(toys.of(run, blocks=1).layers[0] for run in (forward, write))
    for save in ("boundary", "attention", "all"):
        compare(model, step, save != "all", list(model.layers), save=save)


def test_a_write_in_backward_to_memory_that_was_saved_once_is_right(compare, toys, mode):
    compare(toys.of(lambda block, x: torch.tanh(Overwriting.apply(block.lin(x)))), toys.step, **mode)


class Scaled(nn.Module):
    """With the scale frozen autograd saves fewer tensors of the same shape and dtype."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 32).view(4, 8))

    def forward(self, x):
        return torch.tanh(self.lin(x) * torch.exp(self.scale)).sin()


@recomputing
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_layer_that_is_frozen_or_unfrozen_before_backward_is_told(enable, toys, saving, is_trained):
    model = toys.stack(Scaled)
    enable(model, **saving)
    model.layers.requires_grad_(is_trained)
    loss = toys.step(model)
    model.layers.requires_grad_(not is_trained)
    with pytest.raises(RecomputeError, match="frozen or unfrozen"):
        loss.backward()


@recomputing
def test_a_layer_that_is_frozen_for_another_forward_is_right(compare, toys, saving):
    """As a discriminator is, or adapters are that are switched off for a reference."""

    def step(model):
        loss = toys.step(model)
        model.layers.requires_grad_(False)
        other = model(toys.batch(seed=2))
        other.backward()
        model.layers.requires_grad_(True)
        return loss

    compare(toys.stack(Scaled), step, **saving)


@recomputing
def test_a_layers_argument_that_wants_a_gradient_later(compare, toys, saving):
    def forward(block, x, table):
        return torch.tanh(block.lin(x) + torch.sin(table) * table).exp()

    def step(model):
        x, table = model.embed(toys.batch()), torch.linspace(0, 1, 32).view(4, 8)
        for layer in model.layers:
            x = layer(x, table=table)
        table.requires_grad_()
        loss = model.head(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    compare(toys.of(forward), step, **saving)


@recomputing
def test_outputs_summed_up_in_a_layers_argument_free_everything(enable, toys, saving):
    """The argument comes to hold the graph, and must not be held by it."""
    model = toys.of(lambda block, x, total: block.lin(x) + total)
    handle = enable(model, **saving)
    x, total = model.embed(toys.batch()), torch.zeros(4, 8)
    for layer in model.layers:
        x = layer(x, total=total)
        total += x
    assert handle.stats().held_bytes
    del x, total
    assert not handle.stats().held_bytes


class Adapted(nn.Module):
    """A layer to which an adapter may be added."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.adapter = None

    def forward(self, x):
        y = self.lin(x)
        return y if self.adapter is None else y + self.adapter(x.detach())


@recomputing
def test_a_write_to_an_adapter_that_was_added_after_the_first_step_is_told(enable, toys, saving):
    """Nothing saves its first weight, for its input wants no gradient."""
    model = toys.stack(Adapted)
    enable(model, **saving)
    toys.step(model).backward()
    for layer in model.layers:
        layer.adapter = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    loss = toys.step(model)
    with torch.no_grad():
        model.layers[1].adapter[0].weight.add_(1)
    with pytest.raises(RecomputeError, match="modified by an inplace operation"):
        loss.backward()
