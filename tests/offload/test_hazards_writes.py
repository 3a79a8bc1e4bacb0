"""Each mode: writes in place raise where plain autograd raises, and are right where it allows them."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

REFUSED = {}


def refused(run):
    REFUSED[run.__name__] = run
    return run


@refused
def to_the_queries(m, x):
    q, k, v = m.q(x), m.k(x), m.v(x)
    a = m.attend(q, k, v)
    with torch.no_grad():
        q.mul_(2)
    return x + m.o(a)


@refused
def to_the_attention(m, x):
    """Its kernel saved its own output."""
    a = m.attend(m.q(x), m.k(x), m.v(x))
    a.mul_(2)
    return x + m.other(a)


@refused
def to_the_input_of_a_projection(m, x):
    h = m.norm(x)
    a = m.attend(m.q(h), m.k(h), m.v(h))
    h.add_(1)
    return x + m.o(a)


@refused
def to_the_output_that_was_saved(m, x):
    return m.o(m.attend(m.q(x), m.k(x), m.v(x))).exp().add_(1)


@refused
def to_a_weight(m, x):
    y = m.o(m.attend(m.q(x), m.k(x), m.v(x)))
    with torch.no_grad():
        m.k.weight.mul_(1.0)
    return x + y


@refused
def to_a_mask(m, x):
    mask = torch.zeros(6, 6)
    a = m.attend(m.q(x), m.k(x), m.v(x), attn_mask=mask)
    mask.fill_(float("-inf"))
    return x + m.o(a)


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_inside_a_layer_raises(enable, toys, every_mode, name):
    model = toys.stack(lambda: toys.kit(REFUSED[name]), width=16)
    for enabled in (False, True):
        if enabled:
            enable(model, **every_mode)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            toys.read(model).backward()


@pytest.mark.parametrize("part", ["q", "k", "v", "o", "norm", "mlp.up", "mlp.down", "mlp.norm"])
def test_a_write_to_a_weight_after_the_layer_raises(enable, toys, mode, part):
    model = toys.decoder()
    for enabled in (False, True):
        if enabled:
            enable(model, **mode)
        loss = toys.read(model)
        with torch.no_grad():
            model.layers[1].get_submodule(part).weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("part", ["q", "v", "mlp.up", "mlp.down"])
def test_a_write_to_a_bias_is_right_or_refused(enable, toys, mode, part):
    """Plain autograd allows it, for nothing saves a bias; recomputation would see the new one."""
    model = toys.decoder()
    bias = model.layers[1].get_submodule(part).bias
    before = bias.detach().clone()

    def step(model):
        with torch.no_grad():
            bias.copy_(before)
        loss = toys.read(model)
        with torch.no_grad():
            bias.add_(0.5)
        loss.backward()
        return loss.detach()

    expected = toys.grade(model, step)
    enable(model, **mode)
    right_or_refused(toys, model, step, expected)


def test_a_write_to_a_weight_that_this_call_did_not_save_is_right_or_refused(enable, toys, mode):
    """A linear layer saves its weight for the gradient of its input only, which the second call does not want."""

    def step(model):
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        model.embed.requires_grad_(True)
        toys.step(model).backward()
        model.zero_grad()
        model.embed.requires_grad_(False)
        loss = model.head(model.layers[0](model.embed(toys.batch()))).sum()
        with torch.no_grad():
            model.layers[0].lin.weight.mul_(2)
        loss.backward()
        return loss.detach()

    model = toys.of(lambda block, x: torch.tanh(block.lin(x)))
    before = [p.detach().clone() for p in model.parameters()]
    expected = toys.grade(model, step)
    enable(model, **mode)
    right_or_refused(toys, model, step, expected)


def right_or_refused(toys, model, step, expected):
    try:
        got = toys.grade(model, step)
    except RuntimeError as error:
        assert "recompute" in str(error) or "inplace" in str(error)
    else:
        expected.assert_equal(got)


def test_a_write_to_a_layers_output_is_right_or_refused(enable, toys, every_mode):
    """The output's memory may be what the next layer keeps."""
    model = toys.decoder()

    def step(model):
        x = model.embed(toys.tokens())
        for layer in model.layers:
            x = layer(x)
            x.mul_(2)  # the residual's sum, which nothing saved
        return model.head(x).sum()

    expected = toys.grade(model, step)
    enable(model, **every_mode)
    expected.assert_equal(toys.grade(model, step))


def test_a_write_to_a_kept_keyword_between_layers_is_right_or_refused(enable, toys, mode):
    """One mask, changed from layer to layer; plain autograd raises where it was saved."""
    model = toys.decoder()

    def step(model):
        x, mask = model.embed(toys.tokens()), torch.zeros(6, 6)
        for layer in model.layers:
            x = layer(x, mask=mask)
            mask.fill_diagonal_(-1.0)
        return model.head(x).sum()

    for enabled in (False, True):
        if enabled:
            enable(model, **mode)
        with pytest.raises(RuntimeError, match="inplace operation"):
            step(model).backward()


def test_legal_writes_to_what_attention_mode_keeps(compare, toys, mode):
    """Outputs of projections and of attention that no operation saved, written to at the latest moment."""

    def forward(m, x):
        q, k, v = m.q(x), m.k(x), m.v(x)
        with sdpa_kernel(SDPBackend.MATH):
            a = m.attend(q.clone(), k.clone(), v.clone())
        for tensor in (q, k, v, a):
            tensor.zero_()
        y = m.o(x)
        z = F.relu(y) + q + k + v + a
        y.fill_(3)
        return z

    compare(toys.stack(lambda: toys.kit(forward), width=16), toys.read, **mode)
