"""Attention as a user writes it: an autograd Function that is not registered."""

import torch


class OwnAttention(torch.autograd.Function):
    """Saves its weights, which no fused kernel does."""

    @staticmethod
    def forward(ctx, q, k, v):
        weights = torch.softmax(q @ k.mT, -1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        back = weights * (grad @ v.mT)
        scores = back - weights * back.sum(-1, keepdim=True)
        return scores @ k, scores.mT @ q, weights.mT @ grad
