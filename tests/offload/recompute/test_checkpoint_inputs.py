"""Boundary mode: layer inputs of every kind and look come back as they were, bit for bit."""

from collections import namedtuple

import pytest
import torch


def test_keyword_tensors_are_inputs(enable, compare, toys):
    """Gradients reach tensors passed by keyword, and these leave the device too."""
    model = toys.stack()
    results = []
    for enabled in (False, True):
        scale = torch.linspace(0.5, 1.5, 8).expand(4, 8).clone().requires_grad_()
        if enabled:
            handle = enable(model, True)
        model(toys.batch(), scale=scale * 2).backward()
        results.append(scale.grad)
        model.zero_grad()
    assert torch.equal(*results)
    assert handle.stats().offloaded_bytes == 4 * (4 * 8 * 4)  # scale once for all three blocks


Pair = namedtuple("Pair", "left right")


KINDS = {
    "tuple": lambda left, right: (left, right),
    "list": lambda left, right: [left, right],
    "dict": lambda left, right: {"left": left, "right": right},
    "namedtuple": Pair,
}


@pytest.mark.parametrize("kind", KINDS)
def test_nested_inputs_and_outputs_keep_their_type(compare, toys, kind):
    make = KINDS[kind]
    expected = type(make(0, 0))

    def parts(value):
        assert type(value) is expected
        return value.values() if kind == "dict" else value

    def forward(block, both):
        left, right = parts(both)
        return make(torch.tanh(block.lin(left)) * right, right + left)

    def step(model):
        x = model.embed(toys.batch())
        both = make(x, x * 2)
        for layer in model.layers:
            both = layer(both)
        left, right = parts(both)
        return left.sum() + right.prod()

    compare(toys.of(forward), step, True)


def test_the_same_tensor_twice_stays_the_same_object(compare, toys):
    def forward(block, query, key):
        assert query is key
        return block.lin(query) * key

    def step(model):
        x = model.embed(toys.batch())
        for layer in model.layers:
            x = layer(x, key=x)
        return x.sum()

    assert compare(toys.of(forward), step, True).offloaded_bytes == 3 * 4 * 8 * 4
