"""Attention kernels of one's own, registered: autograd Functions and custom operators, in each mode."""

import pytest
import torch
from torch import Tensor

from rlx.offload import register_attention

RUNS = []


def softmax_attention(q, k, v):
    RUNS.append(1)
    scores = q @ k.mT * 0.5
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ v, lse


def softmax_attention_backward(q, k, v, out, lse, grad):
    weights = torch.exp(q @ k.mT * 0.5 - lse[..., None])
    back = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * 0.5
    return back @ k, back.mT @ q, weights.mT @ grad


class Fused(torch.autograd.Function):
    """Saves what flash attention saves."""

    @staticmethod
    def forward(ctx, q, k, v, scale=1.0):
        out, lse = softmax_attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out * scale if scale != 1.0 else out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        return *softmax_attention_backward(q, k, v, out, lse, grad * ctx.scale), None


class WithStatistics(torch.autograd.Function):
    """Gives the log-sum-exp as well, without a gradient, and takes a dropout."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = softmax_attention(q, k, v)
        keep = (torch.rand(out.shape) > 0.3).to(out.dtype)
        ctx.save_for_backward(q, k, v, out, lse, keep)
        ctx.mark_non_differentiable(lse)
        return out * keep, lse, {"size": q.shape}

    @staticmethod
    def backward(ctx, grad, *_):
        q, k, v, out, lse, keep = ctx.saved_tensors
        return softmax_attention_backward(q, k, v, out, lse, grad * keep)


@torch.library.custom_op("rlx_tests::attention", mutates_args=())
def operator(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = softmax_attention(q, k, v)
    return out.contiguous(), lse.contiguous()


def save_for_operator(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def operator_backward(ctx, grad, grad_lse):
    return softmax_attention_backward(*ctx.saved_tensors, grad)


operator.register_autograd(operator_backward, setup_context=save_for_operator)


for function in (Fused, WithStatistics, torch.ops.rlx_tests.attention):
    register_attention(function)


@pytest.mark.parametrize("what", [operator, 3, None])
def test_what_torch_does_not_dispatch_is_refused(what):
    with pytest.raises(ValueError, match="register_attention: got"):
        register_attention(what)


def fused(m, x):
    return x + m.mlp(m.o(m.merge(Fused.apply(m.split(m.q(x)), m.split(m.k(x)), m.split(m.v(x)), 1.5))))


def with_statistics(m, x):
    out, lse, size = WithStatistics.apply(m.split(m.q(x)), m.split(m.k(x)), m.split(m.v(x)))
    assert size["size"][1] == 4
    assert not lse.requires_grad
    return x + m.mlp(m.o(m.merge(out))) * torch.tanh(lse.mean())


def custom_operator(m, x):
    out, lse = torch.ops.rlx_tests.attention(m.split(m.q(x)), m.split(m.k(x)), m.split(m.v(x)))
    return x + m.mlp(m.o(m.merge(out))) * lse.detach().mean()


CALLS = {call.__name__: call for call in (fused, with_statistics, custom_operator)}


def plain(model):
    return model(torch.linspace(-1, 1, 192).sin().view(2, 6, 16))


def retained(model):
    loss = plain(model)
    loss.backward(retain_graph=True)
    return loss + plain(model)


@pytest.mark.parametrize("step", [plain, retained], ids=lambda step: step.__name__)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_plain_autograd(compare, toys, mode, name, step):
    compare(toys.stack(lambda: toys.kit(CALLS[name]), width=16), step, **mode)


@pytest.mark.parametrize("name", CALLS)
def test_a_registered_kernel_runs_once_a_call(enable, toys, saving, name):
    model = toys.stack(lambda: toys.kit(CALLS[name]), width=16)
    enable(model, **saving)
    RUNS.clear()
    toys.read(model).backward()
    assert len(RUNS) == (6 if saving["save"] == "boundary" else 3)


class WritesUnseen(torch.autograd.Function):
    """A kernel on raw memory, as some rotary embeddings are: in place, past the version counter."""

    @staticmethod
    def forward(ctx, x):
        x.detach().numpy()[...] *= 2.0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


@pytest.mark.parametrize("frozen", [False, True])
def test_a_projection_that_is_written_to_unseen_is_computed_again(compare, toys, saving, frozen):
    def forward(m, x):
        q, k = WritesUnseen.apply(m.split(m.q(x))), WritesUnseen.apply(m.split(m.k(x)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, m.split(m.v(x)), is_causal=True, enable_gqa=True)
        return x + m.mlp(m.o(m.merge(out)))

    model = toys.stack(lambda: toys.kit(forward), width=16)
    if frozen:
        for layer in model.layers:
            layer.k.requires_grad_(False)
    compare(model, toys.read, **saving)
