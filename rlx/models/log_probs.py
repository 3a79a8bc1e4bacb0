"""Compute log-probs of given tokens, and the entropy, from logits, in chunks.

Only the gradient of the logits (in their own dtype) is as large as they are. V is the size of the vocabulary.

torch's log_softmax does the work. The passes of `rlx.models.head_log_probs` are written for a compiler: uncompiled, on a CPU with
150,000 tokens in the vocabulary, they take about twice the time and hold 1.4 to 3 times the memory.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24  # 64 MiB in fp32; at most four such temporaries are alive at once
# exp() of anything lower is 0 in fp64 too. It is finite, so that 0 times the log-prob of an impossible token is 0, not NaN.
LOWEST_LOG_PROB = -1e4


def token_log_probs(
    logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of `ids` under softmax(logits / temperature), and the entropy of that distribution.

    Both carry gradients to `logits`. An entropy that enters no loss costs nothing in backward. Views such as `logits[:, a:b]`
    are read in place. A logit of -inf is an impossible token: its log-prob is -inf, and it has no share in the entropy and no
    gradient.

    Args:
        logits: (..., V) floating.
        ids: (...) int64 in [0, V).
        temperature: > 0.
        with_entropy: also return the entropy.

    Returns:
        log_probs (...) and entropy (...) [nats] or None; fp64 for fp64 logits, else fp32.

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.
    """
    if logits.shape[:-1] != ids.shape or logits.dim() < 2:
        raise ValueError(
            f"token_log_probs: got logits {tuple(logits.shape)} and ids {tuple(ids.shape)}, expected (..., V) and (...)"
        )
    check_temperature(temperature)
    log_probs, entropy = _TokenLogProbs.apply(logits, ids, temperature, with_entropy)
    return log_probs, entropy


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that logits cannot be divided by."""
    if not (
        temperature >= torch.finfo(torch.float32).tiny and math.isfinite(temperature)
    ):  # anything less is 0 or denormal in fp32
        raise ValueError(f"temperature: got {temperature}, expected a finite number above 0")


def _chunks(shape: torch.Size) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices that cut logits of this shape into pieces of at most CHUNK_ELEMENTS, or one token, without reshaping."""
    row_elements = math.prod(shape[1:])
    if len(shape) == 2 or row_elements <= CHUNK_ELEMENTS:
        step = max(1, CHUNK_ELEMENTS // max(1, row_elements))
        yield from ((slice(start, start + step),) for start in range(0, shape[0], step))
        return
    for row in range(shape[0]):
        yield from ((row, *rest) for rest in _chunks(shape[1:]))


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    return logits if temperature == 1 else logits.to(dtype, copy=True).div_(temperature)


def _finite(log_probs: Tensor) -> Tensor:
    return log_probs.clamp_(min=LOWEST_LOG_PROB)


def _figures(logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    every = _scaled(logits, temperature, dtype).log_softmax(-1, dtype)
    log_probs = every.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return log_probs, None
    probs = every.exp()
    return log_probs, -probs.mul_(_finite(every)).sum(dim=-1)


def _gradient(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    into: Tensor,
) -> None:
    """Write the gradient of a chunk's logits in their type: d log p_i / d x_k = [i = k] - p_k; d H / d x_k = -p_k (log p_k + H).

    `into` may be the logits themselves.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    zero = torch.zeros(ids.shape, dtype=dtype, device=logits.device)
    own = (zero if grad_log_probs is None else grad_log_probs / temperature).unsqueeze(-1)
    if grad_entropy is None:
        probs, slope = _scaled(logits, temperature, dtype).softmax(-1, dtype), -own
        slope_of_ids = slope
    else:
        every = _scaled(logits, temperature, dtype).log_softmax(-1, dtype)
        probs, every = every.exp(), _finite(every)
        entropy = -(probs * every).sum(dim=-1, keepdim=True)
        slope = every.add_(entropy).mul_(-(grad_entropy / temperature).unsqueeze(-1)).sub_(own)
        slope_of_ids = slope.gather(-1, ids.unsqueeze(-1))
    # Rounded once, because the two terms of an id's entry may nearly cancel.
    of_ids = probs.gather(-1, ids.unsqueeze(-1)) * slope_of_ids + own
    torch.mul(probs, slope, out=into).scatter_(-1, ids.unsqueeze(-1), of_ids.to(logits.dtype))


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probs = torch.empty(ids.shape, dtype=dtype, device=logits.device)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        for chunk in _chunks(logits.shape):
            log_probs[chunk], of_chunk = _figures(logits[chunk], ids[chunk], temperature, with_entropy)
            if entropy is not None:
                entropy[chunk] = of_chunk
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for chunk in _chunks(logits.shape):
            grads = (None if g is None else g[chunk] for g in (grad_log_probs, grad_entropy))
            _gradient(logits[chunk], ids[chunk], ctx.temperature, *grads, into=grad[chunk])
        return grad, None, None, None
