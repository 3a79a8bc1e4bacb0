"""Boundary mode: each hazard of recomputation against plain autograd, bit for bit."""

import weakref

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize(("prefetch", "early", "late"), [(None, 0, 1), (0, 0, 0), (2, 2, 2), (100, 3, 3)])
def test_prefetch_reaches_so_many_layers_ahead(enable, toys, prefetch, early, late):
    """How many layers' inputs are back when the last layer has just been recomputed, and when it is nearly done."""
    ahead = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ahead.append(
                handle.stats().copied_bytes // (4 * 8 * 4) - 4 - 1
            )  # four inputs left, that of the last is back
            return grad

    def forward(block, x):
        y = torch.tanh(block.lin(Watch.apply(x)))
        return torch.tanh(Watch.apply(block.lin(y)))

    model = toys.of(forward, blocks=4)
    handle = enable(model, True, prefetch_layers=prefetch)
    toys.step(model).backward()
    assert ahead[:2] == [early, late]


@pytest.mark.parametrize("save", ["boundary", "attention"])
def test_what_recomputation_saved_keeps_no_input_and_no_result_of_another_call(enable, toys, save):
    """When a layer's backward has just begun, its input and what its last projection gave are gone."""
    seen, alive = [], []

    def forward(block, x):
        query = block.lin(x.clone())[None, None]
        y = block.lin(F.scaled_dot_product_attention(query, query, query, is_causal=True)[0, 0])
        seen.extend(weakref.ref(t.untyped_storage()) for t in (x, y))
        z = torch.exp(y + 1)
        z.register_hook(lambda grad: alive.append([memory() is not None for memory in seen[-2:]]))
        return torch.exp(z)

    model = toys.of(forward, blocks=3)
    enable(model, True, save=save, min_bytes=0)
    toys.step(model).backward()
    assert len(seen) == 12 and alive == [[False, False]] * 3


def test_recomputation_stops_early(enable, toys):
    calls = []

    def forward(block, x):
        y = torch.relu(block.lin(x))
        calls.append("saved")
        y = y.sum(0, keepdim=True).expand(4, 8) + x
        calls.append("not needed")
        return y

    model = toys.of(forward)
    enable(model, True)
    loss = toys.step(model)
    assert calls.count("saved") == calls.count("not needed") == 3
    loss.backward()
    assert calls.count("saved") == 3  # stopped at relu, before the first append
    assert calls.count("not needed") == 3


@pytest.mark.parametrize("where", ["in the layer", "outside"])
def test_a_parameter_in_the_place_of_another_tensor_is_refused(enable, toys, where):
    model = toys.of(
        lambda block, x: F.linear(x.sin(), block.lin.weight if where == "in the layer" else outside[0]).sin()
    )
    lin = model.layers[1].lin
    parameter = lin.weight
    outside = [parameter * 2]
    if where == "in the layer":
        del lin.weight
        lin.weight = outside[0]
    enable(model, True)
    loss = toys.step(model).sum()
    outside[0] = parameter
    if where == "in the layer":
        del lin.weight
        lin.weight = parameter
    with pytest.raises(RuntimeError, match=r"parameter of shape .* replaced|attribute 'weight' .* replaced"):
        loss.backward()


def test_the_default_device_of_forward_is_repeated(enable, toys):
    seen = []

    def forward(block, x):
        seen.append(torch.empty(1).device.type)
        return torch.relu(block.lin(x)) * 2

    model = toys.of(forward)
    enable(model, True)
    with torch.device("meta"):
        x = torch.randn(4, 8, device="cpu")
        loss = model(x)
    loss.backward()
    assert seen == ["meta"] * 6


def test_inputs_made_in_inference_mode(compare, toys):
    with torch.inference_mode():
        mask = torch.tensor([1.0, 0.0] * 4)

    def forward(block, x, mask=None):
        return torch.where(mask > 0, block.lin(x), x)

    compare(toys.of(forward), lambda model: model(toys.batch(), mask=mask), True)
