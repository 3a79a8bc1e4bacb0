"""Boundary mode: layer inputs of every kind and look come back as they were, bit for bit."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn


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


@dataclass
class Both:
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "namedtuple", "dataclass", "ModelOutput"])
def test_nested_inputs_and_outputs_keep_their_type(compare, kind):
    from transformers.modeling_outputs import ModelOutput

    @dataclass
    class Output(ModelOutput):
        left: torch.Tensor | None = None
        right: torch.Tensor | None = None

    make = {
        "tuple": lambda left, right: (left, right),
        "list": lambda left, right: [left, right],
        "dict": lambda left, right: {"left": left, "right": right},
        "namedtuple": Pair,
        "dataclass": Both,
        "ModelOutput": lambda left, right: Output(left=left, right=right),
    }[kind]
    expected_type = {"namedtuple": Pair, "dataclass": Both, "ModelOutput": Output}.get(kind) or type(make(0, 0))

    def parts(value):
        if isinstance(value, dict):
            return value["left"], value["right"]
        return (value.left, value.right) if kind == "dataclass" else tuple(value)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, both):
            assert type(both) is expected_type
            left, right = parts(both)
            return make(torch.tanh(self.lin(left)) * right, right + left)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            both = make(x, x * 2)
            for layer in self.layers:
                both = layer(both)
                assert type(both) is expected_type
            left, right = parts(both)
            return left.sum() + right.prod()

    compare(Model(), lambda m: m(torch.randn(4, 8, requires_grad=True)), True)


def test_the_same_tensor_twice_stays_the_same_object(compare, toys):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, query, key):
            assert query is key
            return self.mha(query, key, key)[0] + query

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Attend() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, x)
            return x.sum()

    stats = compare(Model(), lambda m: m(torch.randn(2, 5, 8, requires_grad=True)), True)
    assert stats.offloaded_bytes == 3 * 2 * 5 * 8 * 4
