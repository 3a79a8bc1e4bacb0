"""Each mode under what is seldom done with a model: other kinds of backward, other kinds of tensors, state in arguments."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel


def test_an_optimizer_that_steps_inside_backward(enable, toys, mode):
    """Weights change as soon as their gradient is whole, while backward goes on below."""

    def train(model):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        torch.manual_seed(7)
        for seed in range(3):
            model(toys.tokens(seed=seed)).backward()
        return list(model.parameters())

    def build():
        return toys.decoder(dropout=0.1)

    expected = train(build())
    model = build()
    enable(model, **mode)
    assert all(map(torch.equal, train(model), expected))


def test_forward_mode_differentiation(enable, toys, saving):
    def tangent(model):
        with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            x = forward_ad.make_dual(toys.tokens(), toys.tokens(seed=5))
            return forward_ad.unpack_dual(model(x)).tangent

    model = toys.decoder()
    expected = tangent(model)
    enable(model, **saving)
    assert torch.equal(tangent(model), expected)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_of_a_leaf_that_is_a_layers_input(enable, toys, saving, cache):
    """Autocast shares the cast of a leaf among calls, whose gradients then meet in half precision."""

    def forward(m, x):
        return m.o(m.attend(m.q(x), m.k(x), m.v(x))) + m.mlp(x)

    model = toys.stack(lambda: toys.kit(forward), width=16)

    def gradients():
        model.zero_grad()
        x = toys.tokens().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            y = x
            for layer in model.layers:
                y = layer(y)
        y.float().square().sum().backward()
        return [x.grad, *(p.grad for p in model.layers.parameters() if p.grad is not None)]

    expected = gradients()
    enable(model, **saving)
    got = gradients()
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


def test_another_default_dtype_in_backward(compare, toys, saving):
    def step(model):
        loss = toys.step(model)
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        return loss.detach()

    compare(toys.of(lambda m, x: x + torch.tanh(m.lin(x * torch.linspace(0.1, 1, 8)))), step, **saving)


def test_meta_tensors(enable, toys, saving):
    model = toys.decoder().to("meta")
    handle = enable(model, **saving)
    model(torch.empty(2, 6, 16, device="meta")).backward()
    assert all(p.grad.device.type == "meta" for p in model.parameters())
    assert handle.stats().offloaded_bytes == 0


def test_a_layer_that_has_no_weights(compare, toys, saving):
    class Layer(nn.Module):
        def forward(self, x):
            return torch.tanh(nn.functional.scaled_dot_product_attention(x, x, x)) * torch.sigmoid(x)

    compare(toys.stack(Layer, width=16), toys.read, **saving)


def test_lists_in_arguments_are_as_plain_autograd_leaves_them(compare, toys, saving):
    class Appends(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = toys.attend()

        def forward(self, x, seen):
            y = self.inner(x)
            seen.append(y)
            return y

    def step(model):
        x, seen = model.embed(toys.tokens()), []
        for layer in model.layers:
            x = layer(x, seen)
        x.sum().backward()
        assert len(seen) == 3
        assert seen[-1] is x
        return x.detach().sum()

    model = toys.stack(Appends, width=16)
    compare(model, step, **saving)


KINDS = {
    "complex": lambda x: torch.view_as_real(torch.complex(x, -x).conj() * torch.complex(x, x)).sum(-1),
    "negative": lambda x: torch.complex(x, -x).conj().imag * x,
    "sparse": lambda x: torch.sparse.mm(x.detach()[0].relu().to_sparse(), x[0].mT).sum() * torch.exp(x * 0.1),
    "nested": lambda x: (
        torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([x[0], x[1, :4]]).cos(), 0.0).sum() * x.sin()
    ),
    "subclass": lambda x: torch.tanh(x.as_subclass(Tagged) * 2).as_subclass(torch.Tensor) * x,
    "integers": lambda x: (
        x.gather(-1, x.argsort(-1)) * torch.where(x > 0, x, -x) + x[:, torch.tensor([5, 0, 0, 2, 1, 3])]
    ),
    "scalars": lambda x: x * x.mean() * x[0, 0, 0].exp() ** 0.1,
}


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_of_other_kinds(compare, toys, every_mode, kind):
    def forward(m, x):
        y = m.norm(x + m.o(m.attend(m.q(x), m.k(x), m.v(x))))
        return torch.tanh(KINDS[kind](y)) + m.mlp(y)

    compare(toys.stack(lambda: toys.kit(forward), width=16), toys.read, **every_mode)
