"""Layers that look at more of their inputs and projections than the values: recomputation shows them the same."""

import pytest
import torch
from torch import nn


def asks_whether_it_is_a_leaf(m, x):
    return x + m.o(m.attend(m.q(x), m.k(x), m.v(2 * x if x.is_leaf else x)))


def asks_for_the_gradient_of_its_input(m, x):
    (slope,) = torch.autograd.grad((3.0 * x).sum(), x)
    return slope * x + m.o(m.attend(m.q(x), m.k(x), m.v(x)))


def asks_for_the_gradient_of_a_projection(m, x):
    queries = m.q(x)
    (slope,) = torch.autograd.grad((3.0 * queries).sum(), queries)
    return x + m.o(m.attend(queries, m.k(x), m.v(x) * slope))


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def writes_to_what_an_unused_branch_has_saved(m, x):
    """The branch saves a view that has no place in a graph any more after the write."""
    queries = m.q(x)
    Same.apply(queries).sin()
    with torch.no_grad():
        queries.mul_(0.5)
    return queries + m.o(m.attend(m.k(x), m.k(x), m.v(x)))


LAYERS = {
    layer.__name__: layer
    for layer in (
        asks_whether_it_is_a_leaf,
        asks_for_the_gradient_of_its_input,
        asks_for_the_gradient_of_a_projection,
        writes_to_what_an_unused_branch_has_saved,
    )
}


def begins_with_a_leaf(model):
    """The first layer's input is a leaf, the others' are not."""
    x = torch.linspace(-1, 1, 2 * 6 * 16).sin().view(2, 6, 16).requires_grad_()
    y = x
    for layer in model.layers:
        y = layer(y)
    loss = model.head(y).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    model.embed.bias.grad = x.grad.sum((0, 1))  # to be compared with the others
    return loss.detach()


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_asks_of_its_tensors(compare, toys, saving, name, min_bytes):
    model = toys.stack(lambda: toys.kit(LAYERS[name]), width=16)
    compare(model, begins_with_a_leaf, **saving, min_bytes=min_bytes)


def test_compiled_parts_under_autocast(enable, toys, saving):
    """Traced anew in recomputation, where a compiler looks at what its inputs are views of."""

    class Compiled(toys.kit):
        def __init__(self):
            super().__init__(None)
            self.gate = torch.compile(nn.SiLU(), backend="eager")

        def forward(self, x):
            return x + self.o(self.attend(self.gate(self.q(x)), self.k(self.gate(x)), self.v(x)))

    def step(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = toys.read(model)
        return loss.float()

    expected = toys.grade(toys.stack(Compiled, width=16), step)
    model = toys.stack(Compiled, width=16)
    enable(model, **saving)
    expected.assert_equal(toys.grade(model, step))
