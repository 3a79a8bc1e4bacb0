"""Each mode: arguments of layers that are more than a tensor's values: views of parameters, attributes, containers, layouts."""

import copy
import dataclasses
from collections import OrderedDict

import pytest
import torch
from torch import nn


class Given(nn.Module):
    """A block that runs `forward(block, x, *more)`; `block.mlp` is a residual MLP."""

    def __init__(self, make, forward):
        super().__init__()
        self.mlp, self.run = make(16), forward

    def forward(self, x, *more, **named):
        return self.run(self, x, *more, **named)


@pytest.fixture
def given(toys):
    """`given(forward)`: a model whose three layers run `forward(block, x, ...)`, with a parameter `table` of shape (10, 16)."""

    def make(forward):
        model = toys.stack(lambda: Given(toys.block, forward), width=16)
        model.table = nn.Parameter(torch.linspace(-2, 2, 160).sin().view(10, 16))
        return model

    return make


def through(model, x, *more, **named):
    """Pass a value through the layers."""
    for layer in model.layers:
        x = layer(x, *more, **named)
    return x


@pytest.mark.parametrize("frozen", [False, True])
def test_a_slice_of_a_parameter(compare, given, toys, mode, frozen):
    def step(model):
        return through(model, model.embed(toys.tokens()), model.table[:6]).sum()

    model = given(lambda block, x, positions: block.mlp(x * positions))
    model.table.requires_grad_(not frozen)
    compare(model, step, **mode)


def test_a_view_of_a_layers_own_parameter(compare, given, toys, mode):
    """The layer reads it as an argument and as its weight."""

    def step(model):
        weight = model.layers[1].mlp.up.weight
        return through(model, model.embed(toys.tokens()), weight[:16, :].t(), weight).sum()

    compare(given(lambda block, x, view, weight: block.mlp(x @ view) + (x @ weight.t()).sin().mean()), step, **mode)


def test_a_view_of_a_parameter_that_was_written_to(enable, given, toys):
    model = given(lambda block, x, positions: block.mlp(x * positions))
    enable(model, True)
    loss = through(model, model.embed(toys.tokens()), model.table[:6]).sum()
    with torch.no_grad():
        model.table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Scaled(torch.Tensor):
    """A subclass with an attribute, which its operations do not pass on."""


def scaled(block, x, mask):
    return block.mlp(x * mask.scale + mask.sum().as_subclass(torch.Tensor))


@pytest.mark.parametrize("kind", [torch.Tensor, Scaled], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_attributes_of_tensors(compare, given, toys, mode, kind, with_gradient):
    """They are those of the call: the model changes them from layer to layer."""

    def step(model):
        x = model.embed(toys.tokens())
        mask = (model.table * 2 if with_gradient else torch.ones(2)).as_subclass(kind)
        for index, layer in enumerate(model.layers):
            mask.scale = 1.5 + index
            x = layer(x, mask)
        return x.sum()

    compare(given(scaled), step, **mode)


def test_a_jagged_tensor(compare, given, toys, mode):
    def forward(block, x):
        return x + block.mlp.down(nn.functional.silu(block.mlp.up(x)))

    def step(model):
        x = model.embed(toys.tokens())
        ragged = torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
        return through(model, ragged).values().sum()

    compare(given(forward), step, **mode)


def test_a_sparse_argument_with_a_gradient(compare, given, toys, mode):
    def step(model):
        place = torch.arange(6)
        matrix = torch.sparse_coo_tensor(torch.stack([place, place.flip(0)]), model.table[:6, 0] * 2, (6, 6))
        return through(model, model.embed(toys.tokens()[0]), matrix).sum()

    compare(given(lambda block, x, matrix: block.mlp(x + torch.sparse.mm(matrix, x))), step, **mode)


TRANSFORMED = {
    "vmap": lambda block, x: torch.vmap(block.mlp)(x),
    "jvp": lambda block, x: block.mlp(x) + torch.func.jvp(block.mlp.norm, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("save", ["boundary", "attention", "all", "auto"])
def test_transforms_of_functions_inside_a_layer(enable, given, toys, save, transform):
    def step(model):
        return through(model, model.embed(toys.tokens())).sum()

    model = given(TRANSFORMED[transform])
    expected = toys.grade(copy.deepcopy(model), step)
    enable(model, save != "all", save=save)
    for _ in range(3):
        expected.assert_equal(toys.grade(model, step))


@dataclasses.dataclass
class State:
    x: torch.Tensor
    routing: torch.Tensor = dataclasses.field(init=False)


def test_a_dataclass_with_a_field_that_is_not_set(compare, given, toys, mode):
    def step(model):
        return through(model, State(model.embed(toys.tokens()))).x.sum()

    compare(given(lambda block, state: State(block.mlp(state.x))), step, **mode)


@pytest.mark.parametrize("make", [dict, OrderedDict], ids=lambda make: make.__name__)
def test_one_container_in_two_arguments(compare, given, toys, mode, make):
    def forward(block, x, shared, same, again):
        assert shared is same is again[0]
        shared["seen"] = block.mlp.norm(x)
        return block.mlp(x * same["seen"])

    def step(model):
        shared = make()
        return through(model, model.embed(toys.tokens()), shared, same=shared, again=[shared]).sum()

    compare(given(forward), step, **mode)


def test_a_generator_as_an_argument(compare, given, toys, mode):
    def forward(block, x, generator):
        return x + block.mlp(x * torch.rand(x.shape, generator=generator))

    def step(model):
        return through(model, model.embed(toys.tokens()), generator=torch.Generator().manual_seed(5)).sum()

    compare(given(forward), step, **mode)


def test_a_packed_sequence(compare, toys, mode):
    def step(model):
        x = nn.utils.rnn.pack_padded_sequence(model.embed(toys.tokens()), torch.tensor([6, 4]), batch_first=True)
        return through(model, x).data.sum()

    def forward(self, x):
        return nn.utils.rnn.PackedSequence(self.lstm(x)[0].data + self.lin(x.data), *x[1:])

    model = toys.of(forward, width=16)
    for block in model.layers:
        block.lstm = nn.LSTM(16, 16)
    compare(model, step, **mode)
