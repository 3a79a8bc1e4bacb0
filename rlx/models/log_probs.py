"""Log-probs of given tokens, and the entropy, from logits, without a full copy of the logits in fp32.

The logits are taken in chunks, in forward and again in backward, so that beside them only their gradient (in their own
dtype) is ever as large as they are.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24  # 64 MiB in fp32; at most four such temporaries are alive at once
# exp() of anything below is 0 in fp64 too. Finite, so that 0 times the log-prob of an impossible token is 0, not NaN.
LOWEST_LOG_PROB = -1e4


def token_log_probs(
    logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `ids` under softmax(logits / temperature), and the entropy of that distribution.

    Both carry gradients to `logits`. An entropy that goes into no loss costs nothing in backward. Views such as
    `logits[:, a:b]` are read in place. A logit of -inf is an impossible token: log-prob -inf, no share in the entropy,
    no gradient.

    Args:
        logits: (..., V) floating.
        ids: (...) int64 in [0, V).
        temperature: > 0.
        with_entropy: also return the entropy.

    Returns:
        log_probs (...) and entropy (...) [nats] or None; fp64 for fp64 logits, else fp32.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    if logits.shape[:-1] != ids.shape or logits.dim() < 2:
        raise ValueError(
            f"token_log_probs: got logits {tuple(logits.shape)} and ids {tuple(ids.shape)}, expected (..., V) and (...)"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature: got {temperature}, expected a finite number above 0")
    log_probs, entropy = _TokenLogProbs.apply(logits, ids, temperature, with_entropy)
    return log_probs, entropy


def _chunks(shape: torch.Size) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut logits of this shape into pieces of at most CHUNK_ELEMENTS (or one token), without reshaping."""
    row_elements = math.prod(shape[1:])
    if len(shape) == 2 or row_elements <= CHUNK_ELEMENTS:
        step = max(1, CHUNK_ELEMENTS // max(1, row_elements))
        yield from ((slice(start, start + step),) for start in range(0, shape[0], step))
        return
    for row in range(shape[0]):
        yield from ((row, *rest) for rest in _chunks(shape[1:]))


def _all_log_probs(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    if temperature == 1:
        return torch.log_softmax(logits, dim=-1, dtype=dtype)
    return torch.log_softmax(logits.to(dtype) / temperature, dim=-1)


def _finite(log_probs: Tensor) -> Tensor:
    return log_probs.clamp_(min=LOWEST_LOG_PROB)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probs = torch.empty(ids.shape, dtype=dtype, device=logits.device)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        for chunk in _chunks(logits.shape):
            every = _all_log_probs(logits[chunk], temperature, dtype)
            log_probs[chunk] = every.gather(-1, ids[chunk].unsqueeze(-1)).squeeze(-1)
            if entropy is not None:
                probs = every.exp()
                entropy[chunk] = -probs.mul_(_finite(every)).sum(dim=-1)
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        dtype = torch.promote_types(logits.dtype, torch.float32)
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for chunk in _chunks(logits.shape):
            every = _all_log_probs(logits[chunk], ctx.temperature, dtype)
            probs = every.exp()
            # d log p_i / d x_k = [i = k] - p_k;  d H / d x_k = -p_k (log p_k + H)
            slope = torch.zeros_like(probs[..., :1])
            if grad_log_probs is not None:
                slope = slope - grad_log_probs[chunk].unsqueeze(-1)
            if grad_entropy is not None:
                every = _finite(every)
                entropy = -(probs * every).sum(dim=-1, keepdim=True)
                slope = slope - grad_entropy[chunk].unsqueeze(-1) * every.add_(entropy)
            part = probs.mul_(slope)
            if grad_log_probs is not None:
                own = grad_log_probs[chunk].unsqueeze(-1)
                part.scatter_add_(-1, ids[chunk].unsqueeze(-1), own.to(dtype))
            grad[chunk] = part.div_(ctx.temperature)
        return grad, None, None, None
