"""Calls that attention mode might answer from the host, under conditions that a naive answer gets wrong."""

import copy

import pytest
import torch
from torch import nn

from rlx.offload import OffloadOptions, offload_activations

WIDTH = 16


CUTS = {
    "chunks": lambda fused: fused.chunk(3, -1),
    "gaps": lambda fused: (fused[..., 1:17], fused[..., 17:33], fused[..., 30:46]),
    "overlaps": lambda fused: (fused[..., :16], fused[..., 4:20], fused[..., 8:24]),
    "one_of_them_copied": lambda fused: (fused[..., :16], fused[..., 16:32].clone(), fused[..., 32:]),
    "the_same_twice": lambda fused: (fused[..., :16], fused[..., :16], fused[..., 16:32]),
    "planes_in_another_order": lambda fused: fused.reshape(3, 2, 6, 16).unbind(0)[::-1],
    "detached": lambda fused: (fused[..., :16], fused[..., 16:32].detach(), fused[..., 32:]),
}


class Layered(nn.Module):
    """A model whose layers take three tensors."""

    def __init__(self, toys, run):
        super().__init__()
        torch.manual_seed(0)

        class Layer(toys.kit):
            def forward(self, q, k, v):
                return run(self, q, k, v)

        self.fused = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
        self.blocks = nn.ModuleList(Layer(run) for _ in range(4))

    def forward(self, x, cut):
        for fused, block in zip(self.fused, self.blocks, strict=True):
            x = x + block(*cut(fused(x)))
        return x.sum()


def attention_of_its_arguments(m, q, k, v):
    return m.o(m.attend(q, k, v))


def linear_maps_of_its_arguments(m, q, k, v):
    return m.o(m.attend(m.q(q), m.k(k), m.v(v))) + m.mlp(q * k)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("run", [attention_of_its_arguments, linear_maps_of_its_arguments])
@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=["moved", "kept"])
def test_arguments_that_share_a_storage(compare, toys, saving, run, cut, min_bytes):
    model = Layered(toys, run)
    step = lambda m: m(toys.tokens(), CUTS[cut])  # noqa: E731
    compare(model, step, layers=list(model.blocks), min_bytes=min_bytes, **saving)


def writes_into_a_given_tensor(m, x):
    table = torch.zeros(12, 16)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        torch.mm(x.float().flatten(0, 1), m.other.weight, out=table)
    y = x + table.view(2, 6, 16)
    return y + m.mlp(m.o(m.attend(m.q(y), m.k(y), m.v(y))))


def result_is_a_view_of_a_wider_one(m, x):
    wide = m.qkv(x).transpose(-1, -2)[:, 5:21].transpose(-1, -2)
    return x + m.mlp(m.o(m.attend(m.q(x), wide, wide[..., :].flip(-1))))


def linear_maps_in_other_ways(m, x):
    flat = x.flatten(0, 1)
    q = torch.addmm(m.q.bias, flat, m.q.weight, beta=0.5, alpha=2.0)
    k = torch.mm(flat, m.k.weight)
    v = torch.baddbmm(m.v.bias.to(x.dtype), x, m.v.weight.to(x.dtype).expand(2, 16, 16))
    a = m.attend(q.view(2, 6, 16), k.view(2, 6, 16), v)
    return x + torch.einsum("bsd,de->bse", a, m.o.weight)


def result_is_used_up_in_place(m, x):
    y = m.o(m.attend(m.q(x), m.k(x), m.v(x)))
    return y.add_(x).tanh_().mul(2)


ODD = {
    function.__name__: function
    for function in (
        writes_into_a_given_tensor,
        result_is_a_view_of_a_wider_one,
        linear_maps_in_other_ways,
        result_is_used_up_in_place,
    )
}


@pytest.mark.parametrize("name", ODD)
def test_gradients_are_those_of_plain_autograd(compare_layer, saving, name):
    compare_layer(ODD[name], **saving)


def test_engines_inside_one_another(enable, toys, saving):
    """One handle for the layers, another for what lies in them."""
    model = toys.decoder(dropout=0.1)
    expected = toys.grade(copy.deepcopy(model), toys.read)
    outer = enable(model, **saving)
    inner = enable(model, False, layers=[f"layers.{i}.mlp" for i in range(3)], save="all")
    expected.assert_equal(toys.grade(model, toys.read))
    assert outer.stats().held_bytes == inner.stats().held_bytes == 0
    inner.disable()
    expected.assert_equal(toys.grade(model, toys.read))


def test_a_region_around_an_enabled_model(enable, toys, saving):
    model = toys.decoder(dropout=0.1)
    expected = toys.grade(copy.deepcopy(model), toys.read)
    enable(model, **saving)

    def step(model):
        with offload_activations(OffloadOptions(min_bytes=0)):
            return toys.read(model)

    expected.assert_equal(toys.grade(model, step))


CHANGES = {
    "eval_dropout": lambda layer: layer.mlp.eval(),
    "replaced_module": lambda layer: setattr(layer.mlp, "up", nn.Linear(16, 32)),
    "frozen": lambda layer: layer.requires_grad_(False),
    "thawed": lambda layer: layer.k.requires_grad_(True),
    "moved_dtype": lambda layer: layer.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changes_between_forward_and_backward_is_right_or_refused(enable, toys, saving, change):
    def step(model):
        loss = toys.read(model)
        for layer in model.layers:
            CHANGES[change](layer)
        loss.backward()
        return loss.detach()

    outcomes = []
    for enabled in (False, True):
        model = toys.decoder(dropout=0.2)
        for layer in model.layers:
            layer.k.requires_grad_(False)
        if enabled:
            enable(model, **saving)
        try:
            outcomes.append(toys.grade(model, step))
        except RuntimeError:
            outcomes.append(None)
    plain, offloaded = outcomes
    assert offloaded is None or plain is not None
    if offloaded is not None:
        plain.assert_equal(offloaded)
