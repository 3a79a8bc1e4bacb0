"""Each mode on a decoder with attention, bit for bit as plain autograd: graphs of every kind, inputs of every layout."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_equal(compare, toys, every_mode, dropout):
    stats = compare(toys.decoder(dropout=dropout, attention_dropout=dropout), toys.read, **every_mode)
    assert stats.offloaded_bytes > 0


@pytest.mark.parametrize("prefetch", [0, 2, 100])
def test_any_prefetch_is_valid(compare, toys, mode, prefetch):
    compare(toys.decoder(blocks=5), toys.read, prefetch_layers=prefetch, **mode)


@pytest.mark.parametrize("min_bytes", [300, 1 << 20])
def test_any_threshold_is_valid(compare, toys, mode, min_bytes):
    compare(toys.decoder(dropout=0.1), toys.read, min_bytes=min_bytes, **mode)


def test_several_graphs_alive(compare, toys, every_mode):
    """Of lengths that vary; backward runs in another order than forward."""

    def step(model):
        model(toys.tokens(length=1)).backward()
        losses = [model(toys.tokens(length=length, seed=length)) for length in (3, 7, 5)]
        for index in (1, 2, 0):
            losses[index].backward()
        return losses[0].detach()

    compare(toys.decoder(dropout=0.1, attention_dropout=0.1), step, **every_mode)


def test_a_retained_graph(compare, toys, every_mode):
    def step(model):
        loss = toys.read(model)
        for _ in range(3):
            loss.backward(retain_graph=True)
        return loss

    compare(toys.decoder(dropout=0.1, attention_dropout=0.1), step, **every_mode)


@pytest.mark.parametrize("wanted", ["layers.1.o.weight", "embed.weight"])
def test_gradients_of_some_parameters(compare, toys, mode, wanted):
    """Then of all: what the first pass did not come to is still there."""

    def step(model):
        loss = toys.read(model)
        (grad,) = torch.autograd.grad(loss, model.get_parameter(wanted), retain_graph=True)
        return loss + grad.sum()

    compare(toys.decoder(dropout=0.1), step, **mode)


def test_double_backward(compare, toys, every_mode):
    def step(model):
        x = toys.tokens().requires_grad_()
        (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
        loss = grad.square().sum()
        loss.backward()
        return loss.detach()

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        compare(toys.decoder(), step, **every_mode)


def test_the_gradient_of_the_input(enable, toys, mode):
    grads = []
    model = toys.decoder(blocks=3)
    for enabled in (False, True):
        if enabled:
            enable(model, **mode)
        x = y = toys.tokens().requires_grad_()
        for layer in model.layers:
            y = layer(y)
        y.square().sum().backward()
        grads.append(x.grad)
        model.zero_grad()
    assert torch.equal(*grads)


def test_a_layer_that_runs_several_times(compare, toys, every_mode):
    def step(model):
        x = model.embed(toys.tokens())
        for layer in (*model.layers, model.layers[0], model.layers[0], model.layers[2]):
            x = layer(x)
        return x.sum()

    compare(toys.decoder(dropout=0.1), step, prefetch_layers=2, **every_mode)


def test_hooks_of_a_layer_run_once_a_call(enable, toys, every_mode):
    model = toys.decoder()
    ran = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: ran.append("pre"))
        layer.register_forward_hook(lambda *_: ran.append("post"))
        layer.register_full_backward_pre_hook(lambda *_: ran.append("back pre"))
        layer.register_full_backward_hook(lambda *_: ran.append("back"))
        layer.q.register_full_backward_hook(lambda *_: ran.append("q back"))
    enable(model, **every_mode)
    toys.read(model).backward()
    assert {name: ran.count(name) for name in ran} == {"pre": 3, "post": 3, "back pre": 3, "back": 3, "q back": 3}


def test_a_hook_that_changes_gradients(compare, toys, mode):
    def step(model):
        tripled = model.layers[1].v.weight.register_hook(lambda grad: grad * 3)
        toys.read(model).backward()
        tripled.remove()
        return toys.read(model)

    model = toys.decoder()
    model.layers[1].o.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    compare(model, step, **mode)


def test_host_memory_that_is_full(compare, toys, every_saving):
    def step(model):
        return model(toys.tokens(rows=64, length=32))

    model = toys.decoder(dropout=0.1)
    whole = compare(model, step, **every_saving)
    some = compare(model, step, max_host_bytes=whole.offloaded_bytes // 2, **every_saving)
    none = compare(model, step, max_host_bytes=0, **every_saving)
    assert whole.offloaded_bytes > some.offloaded_bytes > none.offloaded_bytes == 0


def test_a_frozen_input_and_frozen_weights(compare, toys, every_mode):
    model = toys.decoder(dropout=0.1, attention_dropout=0.1)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.v.requires_grad_(True)
        layer.mlp.norm.requires_grad_(True)
    compare(model, toys.read, **every_mode)
    model.layers[0].requires_grad_(False)  # whose input needs no gradient either
    compare(model, toys.read, **every_mode)
    model.layers[2].requires_grad_(False)
    compare(model, toys.read, **every_mode)


class Tower(nn.Module):
    """Layers that take and give what is not a plain tensor."""

    def __init__(self, toys):
        super().__init__()
        self.layers = toys.decoder().layers

    def forward(self, x, wrap):
        for layer in self.layers:
            x = layer(wrap(x))
        return x.sum()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x[:1].expand_as(x),
        lambda x: torch.cat([x, x], 1)[:, 1:7],
        lambda x: torch.cat([x, x], -1)[..., 1:17],
        lambda x: x.flip(0),
    ],
    ids=["transposed", "expanded", "shifted", "gapped", "copied"],
)
def test_inputs_of_any_layout(compare, toys, mode, wrap):
    compare(Tower(toys), lambda m: m(toys.tokens().requires_grad_(), wrap), **mode)


def test_stride_0_is_never_written_out(enable, toys, every_mode):
    model = toys.of(lambda block, x: (x * block.lin.bias)[:1].expand(1000, 8))
    handle = enable(model, **every_mode)
    x = model.embed(toys.batch(rows=1)).expand(1000, 8)
    for layer in model.layers:
        x = layer(x)
    x.sum().backward()
    assert handle.stats().offloaded_bytes == 3 * 8 * 4
