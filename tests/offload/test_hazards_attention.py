"""Layers that use attention in every way a model might, in each mode, bit for bit as plain autograd."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS = {}


def layer(run):
    LAYERS[run.__name__] = run
    return run


def causal(dtype):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return mask if dtype is torch.bool else torch.zeros(6, 6, dtype=dtype).masked_fill(~mask, float("-inf"))


@layer
def dropout_in_attention_then_dropout(m, x):
    x = x + F.dropout(m.o(m.attend(m.q(x), m.k(x), m.v(x), dropout_p=0.5)), 0.5)
    return x + F.dropout(m.mlp(x), 0.5)


@layer
def writes_to_projections(m, x):
    """A linear layer does not save its output, so that writing to it is legal."""
    q, k, v = m.q(x), m.k(x), m.v(x)
    q.mul_(0.5).add_(1)
    k[..., :4] *= 2
    v[:, 0].zero_()
    y = m.o(m.attend(q, k, v))
    y += x
    y.relu_()
    return x + m.mlp(y)


@layer
def writes_to_a_fused_projection(m, x):
    qkv = m.qkv(x)
    qkv[..., :4] *= 2
    with torch.no_grad():
        qkv[..., 40:].clamp_(-0.1, 0.1)
    return x + m.mlp(m.o(m.attend(*qkv.chunk(3, -1))))


@layer
def writes_to_its_own_activation(m, x):
    return x + m.down(F.relu(m.up(x), inplace=True)) + m.o(F.dropout(m.q(x), 0.3, inplace=True))


@layer
def grouped_queries(m, x):
    q, k, v = m.split(m.q(x)), m.split(m.narrow(x)), m.split(m.narrow(x).sin())
    return x + m.mlp(m.o(m.merge(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))))


@layer
def one_head_of_keys_expanded(m, x):
    k = m.split(m.narrow(x))[:, :1].expand(2, 4, 6, 4)
    return x + m.mlp(m.o(m.merge(F.scaled_dot_product_attention(m.split(m.q(x)), k, k))))


@layer
def mask_that_is_learned(m, x):
    mask = m.bias + causal(torch.float32)
    return x + m.mlp(m.o(m.attend(m.q(x), m.k(x), m.v(x), attn_mask=mask)))


@layer
def mask_that_hides_everything(m, x):
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    return x + m.mlp(m.o(m.attend(m.q(x), m.k(x), m.v(x), attn_mask=mask)).nan_to_num())


@layer
def adapters(m, x):
    def adapted(part):
        return part(x) + 2 * F.linear(F.linear(F.dropout(x, 0.1), part.weight[:3]), part.weight[3:6].t())

    return x + m.mlp(m.o(m.attend(adapted(m.q), adapted(m.k), adapted(m.v))))


@layer
def two_attentions(m, x):
    x = x + m.o(m.attend(m.q(x), m.k(x), m.v(x), is_causal=True))
    memory = torch.tanh(m.other(x))
    return x + m.mlp(m.o(m.attend(m.q(x), m.k(memory), m.v(memory))))


@layer
def attention_is_the_output(m, x):
    return m.attend(m.q(x), m.k(x), m.v(x))


@layer
def writes_without_gradient(m, x):
    with torch.no_grad():
        k = m.k(x)
        k.mul_(2)
        a = m.attend(m.q(x), k, m.v(x))
        a.add_(1)
        y = m.other(a)
        y.mul_(3)
    return x + m.mlp(m.o(m.attend(m.q(x), k, m.v(x))) + y)


@layer
def writes_after_attention(m, x):
    k = m.k(x)
    with sdpa_kernel(SDPBackend.MATH):
        a = m.attend(m.q(x), k * 1, m.v(x))
    k.mul_(2)
    return x + m.o(m.attend(m.other(x), k, a))


@layer
def gradient_switched_on_again(m, x):
    with torch.no_grad():
        frozen = m.other(x)
        with torch.enable_grad():
            a = m.attend(m.q(frozen), m.k(frozen), m.v(frozen))
    return x + m.o(a)


@layer
def writes_to_attention_that_nothing_saved(m, x):
    with sdpa_kernel(SDPBackend.MATH):
        a = m.attend(m.q(x), m.k(x), m.v(x))
    a.mul_(2)
    return x + m.other(a)


@layer
def empty_and_single_rows(m, x):
    first = x[:, :1]
    none = m.o(m.attend(m.q(x[:0]), m.k(x[:0]), m.v(x[:0]))).sum()
    return x + m.o(m.attend(m.q(first), m.k(x), m.v(x))) + none


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_plain_autograd(compare_layer, saving, name):
    compare_layer(LAYERS[name], **saving)
