"""Log-probs of given tokens, and the entropy, from hidden states and the head's weight or from logits, in chunks.

From hidden states there are never more logits than one chunk's. From logits, their gradient (in their own dtype) is all
that is ever as large as they are.

Shape letters: N tokens, H width of the hidden states, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24  # 64 MiB in fp32; at most four such temporaries are alive at once
# The head's chunks are larger, since each costs one pass over the gradient of its weight.
HEAD_CHUNK_ELEMENTS = 1 << 28
# Of so many chunks in bf16 or fp16 the gradients share one product and one such pass. Recomputed logits lie where their gradient will.
CHUNKS_PER_SUM = 2
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
    _check_temperature(temperature)
    log_probs, entropy = _TokenLogProbs.apply(logits, ids, temperature, with_entropy)
    return log_probs, entropy


def head_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """What `token_log_probs` gives for the logits hidden @ weight.T, of which one chunk exists at a time.

    Logits are rounded to the type of `hidden`, as the head would round them; what follows is in fp32. Backward computes
    the logits of all chunks but the last again. The gradient of a weight in bf16 or fp16 is the sum in fp32 of the
    products of two chunks each, rounded to its type like any other product.

    Args:
        hidden: (..., H) floating.
        weight: (V, H) in the same type.
        ids: (...) int64 in [0, V).
        temperature: > 0.
        with_entropy: also return the entropy.

    Returns:
        log_probs (...) and entropy (...) [nats] or None; fp64 for fp64, else fp32.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    if hidden.shape[:-1] != ids.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(
            f"head_log_probs: got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and ids {tuple(ids.shape)}, "
            "expected (..., H), (V, H) and (...)"
        )
    _check_temperature(temperature)
    figures = _HeadLogProbs.apply(hidden.flatten(0, -2), weight, ids.flatten(), temperature, with_entropy)
    log_probs, entropy = (None if x is None else x.view(ids.shape) for x in figures)
    return log_probs, entropy


@contextmanager
def head_replaced(head: nn.Linear, ids: Tensor, temperature: float, with_entropy: bool) -> Iterator[None]:
    """Inside, the head of a language model gives log-probs of `ids` (...), and the entropy, instead of logits.

    The head is still called within the model's forward, so whoever brings its weight there (FSDP, say) does as always.
    Its result is (..., 1), with the entropy (..., 2).
    """

    def forward(hidden: Tensor) -> Tensor:
        figures = head_log_probs(hidden, head.weight, ids, temperature, with_entropy)
        return torch.stack([x for x in figures if x is not None], dim=-1)

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward  # the class's own is behind it


def _check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature: got {temperature}, expected a finite number above 0")


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
    return torch.log_softmax(logits.to(dtype, copy=True).div_(temperature), dim=-1)


def _all_probs(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    if temperature == 1:
        return torch.softmax(logits, dim=-1, dtype=dtype)
    return torch.softmax(logits.to(dtype, copy=True).div_(temperature), dim=-1)


def _finite(log_probs: Tensor) -> Tensor:
    return log_probs.clamp_(min=LOWEST_LOG_PROB)


def _figures(logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropy of a chunk."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    every = _all_log_probs(logits, temperature, dtype)
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
    """Gradient of a chunk's logits, in their type: d log p_i / d x_k = [i = k] - p_k; d H / d x_k = -p_k (log p_k + H).

    It may take the place of the logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    zero = torch.zeros(ids.shape, dtype=dtype, device=logits.device)
    own = (zero if grad_log_probs is None else grad_log_probs / temperature).unsqueeze(-1)
    if grad_entropy is None:
        probs, slope = _all_probs(logits, temperature, dtype), -own
        slope_of_ids = slope
    else:
        every = _all_log_probs(logits, temperature, dtype)
        probs, every = every.exp(), _finite(every)
        entropy = -(probs * every).sum(dim=-1, keepdim=True)
        slope = every.add_(entropy).mul_(-(grad_entropy / temperature).unsqueeze(-1)).sub_(own)
        slope_of_ids = slope.gather(-1, ids.unsqueeze(-1))
    # Rounded once: the two terms of an id's entry may all but cancel.
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


class _HeadLogProbs(torch.autograd.Function):
    """Backward goes through the chunks from the last to the first, whose logits forward has left there."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        log_probs = torch.empty(ids_N.shape, dtype=dtype, device=hidden_NH.device)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        ctx.step = max(1, HEAD_CHUNK_ELEMENTS // len(weight_VH))
        logits = None
        for start in range(0, len(ids_N), ctx.step):
            chunk = slice(start, start + ctx.step)
            logits = F.linear(hidden_NH[chunk], weight_VH)
            log_probs[chunk], of_chunk = _figures(logits, ids_N[chunk], temperature, with_entropy)
            if entropy is not None:
                entropy[chunk] = of_chunk
        ctx.save_for_backward(hidden_NH, weight_VH, ids_N, logits)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, ids_N, logits = ctx.saved_tensors
        count, wide = len(ids_N), torch.promote_types(weight_VH.dtype, torch.float32)
        rows = ctx.step * (CHUNKS_PER_SUM if wide != weight_VH.dtype else 1)
        grad_hidden = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # A single product needs no sum.
            grad_weight = torch.zeros_like(weight_VH, dtype=wide if count > rows else None)
        buffer = hidden_NH.new_empty(min(rows, count), len(weight_VH))
        for start in reversed(range(0, count, rows)):
            summed = slice(start, min(start + rows, count))
            gradient = buffer[: summed.stop - start]
            for first in reversed(range(start, summed.stop, ctx.step)):
                chunk = slice(first, min(first + ctx.step, count))
                own = gradient[first - start : chunk.stop - start]
                if logits is None:
                    logits = torch.mm(hidden_NH[chunk], weight_VH.T, out=own)
                grads = (None if g is None else g[chunk] for g in (grad_log_probs, grad_entropy))
                _gradient(logits, ids_N[chunk], ctx.temperature, *grads, into=own)
                logits = None
            if grad_hidden is not None:
                torch.mm(gradient, weight_VH, out=grad_hidden[summed])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, hidden_NH[summed])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VH.dtype), None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b in place; where `total` is wider than they are, a part at a time, so that no second one of its size is."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
        return
    step = max(1, HEAD_CHUNK_ELEMENTS // total.shape[1])
    for start in range(0, len(total), step):
        total[start : start + step].add_(a[start : start + step] @ b)
