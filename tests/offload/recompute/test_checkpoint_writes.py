"""Boundary mode: writes in place, refused where plain autograd refuses them and right where it allows them."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput


def raises_as_plain(toys, enable, forward, after=None):
    """Both plain autograd and the engine raise RuntimeError for a write in place."""
    model = toys.of(forward)
    for enabled in (False, True):
        if enabled:
            enable(model, True)
        x = model.embed(toys.batch())
        outputs = []
        for layer in model.layers:
            x = layer(x)
            outputs.append(x)
        if after is not None:
            with torch.no_grad():
                after(outputs)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x.sum().backward()


def test_a_write_through_a_view_of_what_a_layer_computed_raises(toys, enable):
    views = []

    def forward(block, x):
        y = block.lin(x).exp()
        views.append(y[0])
        return torch.tanh(y)

    raises_as_plain(toys, enable, forward, lambda outputs: views[-1].mul_(2))
    views.clear()  # they hold graphs


@pytest.mark.parametrize("read", [lambda table: table, torch.Tensor.detach], ids=["as it is", "detached"])
def test_a_write_to_a_tensor_that_a_layer_closes_over_raises(toys, enable, read):
    """Nobody else holds what was saved; but recomputation reads the tensor anew."""
    table = torch.full((8,), 2.0)

    raises_as_plain(toys, enable, lambda block, x: block.lin(x) * read(table), lambda outputs: table.mul_(3))


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
@pytest.mark.parametrize("save", ["boundary", "attention"])
@pytest.mark.parametrize("written", ["projected", "attended", "output", "activated"])
def test_a_write_through_an_alias_without_graph_spoils_nothing(toys, enable, written, save, min_bytes):
    """Plain autograd raises where nobody but such an alias is left. What is computed anew is right whatever the alias says, and a
    kept result that it wrote to is computed anew too."""
    aliases = []

    def forward(block, x):
        projected = block.lin(x)
        attended = F.scaled_dot_product_attention(projected, projected, projected)
        output = block.lin(attended)
        activated = torch.tanh(output)
        named = {"projected": projected, "attended": attended, "output": output, "activated": activated}
        aliases.append(named[written].detach())
        return torch.tanh(block.lin(activated))

    model = toys.of(forward)
    toys.step(model).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    enable(model, True, save=save, min_bytes=min_bytes)
    loss = toys.step(model)
    for alias in aliases[-len(model.layers) :]:
        alias.mul_(7)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return self.lin(torch.tanh(x + self.bias))


def test_an_input_that_no_operation_saved_may_be_written_to_later(compare, toys):
    """Its bytes have left before; recomputation sees the old ones."""

    class Model(type(toys.stack())):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                y = layer(x)
                with torch.no_grad():
                    x.detach().zero_()
                x = y
            return self.head(x).sum()

    model = Model(Shifted)
    compare(model, toys.step, True)


def test_a_kept_input_that_is_written_to_later_is_refused(enable, toys):
    model = toys.stack(Shifted)
    enable(model, True, min_bytes=1 << 20)
    x = model.embed(toys.batch())
    y = model.layers[0](x)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="an input of a layer"):
        y.sum().backward()


def test_a_layer_that_writes_to_its_own_input_is_refused_at_once(enable, toys):
    model = toys.of(lambda block, x: block.lin(x.mul_(2)))
    enable(model, True)
    with pytest.raises(RuntimeError, match=r"layer layers\.0 modifies one of its inputs"):
        toys.step(model)


@dataclass
class Bundle:
    hidden: torch.Tensor
    scale: float = 2.0

    def __getitem__(self, name):
        return getattr(self, name)


@pytest.mark.parametrize("bundle", [Bundle, OrderedDict, UserDict, ModelOutput])
def test_inputs_in_containers_leave_and_are_watched(compare, enable, toys, bundle):
    def forward(block, x):
        assert type(x) is bundle
        return bundle(hidden=torch.tanh(block.lin(x["hidden"])))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = toys.of(forward, blocks=3).layers
            self.embed = nn.Linear(8, 8)

        def forward(self, x, scale=1.0):
            x = bundle(hidden=self.embed(x))
            for layer in self.layers:
                before, x = x, layer(x)
                if scale != 1.0:
                    before["hidden"].detach().mul_(scale)
            return x["hidden"].square().sum()

    model = Model()
    assert compare(model, toys.step, True).offloaded_bytes == 3 * 4 * 8 * 4
    enable(model, True, min_bytes=1 << 20)
    with pytest.raises(RuntimeError, match="an input of a layer"):
        model(toys.batch(), scale=3.0).backward()
