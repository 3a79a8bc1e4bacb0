"""Compute log-probs of given tokens, and the entropy, in chunks: from logits, or from hidden states and the head's weight.

From logits, torch's log_softmax does the work; only the gradient of the logits (in their own dtype) is as large as they are.

Note [passes over logits]
From hidden states, apart from three matrix products (logits, gradients of hidden states and of the weight) the whole cost is
reading and writing logits. Two functions therefore do the work on a chunk, one for forward and one for backward. A compiler turns
each into one or two passes without intermediate results: they move 4 to 8 bytes per bf16 logit, while separate operations move 40.
Forward saves 12 bytes per token for backward: the largest logit, the logarithm of the sum, the entropy. Without a compiler the
same functions run on slices that are small enough for their intermediate results not to matter. On a CPU with a large vocabulary
they take about twice the time of log_softmax, and more memory.

Shape letters: N tokens, H width of the hidden states, V vocabulary.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 24  # 64 MiB in fp32; at most four such temporaries are alive at once
# exp() of anything lower is 0 in fp64 too. It is finite, so that 0 times the log-prob of an impossible token is 0, not NaN.
LOWEST_LOG_PROB = -1e4
# Logits of a chunk. Each chunk costs a pass over the sum of the weight's gradient, and all but the last also a second product.
HEAD_CHUNK_BYTES = 3 << 30
SUM_ELEMENTS = 1 << 28  # of the weight's gradient at a time, if a product cannot have a wider type than its factors
ALIGNED = 256  # chunk lengths are multiples of it, because matrix products are much slower for odd lengths and offsets


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

    Returns log_probs (...) and entropy (...) [nats] or None; fp64 for fp64 logits, else fp32.
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


def _logit_chunks(shape: torch.Size) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices that cut logits of this shape into pieces of at most CHUNK_ELEMENTS, or one token, without reshaping."""
    row_elements = math.prod(shape[1:])
    if len(shape) == 2 or row_elements <= CHUNK_ELEMENTS:
        step = max(1, CHUNK_ELEMENTS // max(1, row_elements))
        yield from ((slice(start, start + step),) for start in range(0, shape[0], step))
        return
    for row in range(shape[0]):
        yield from ((row, *rest) for rest in _logit_chunks(shape[1:]))


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
        for chunk in _logit_chunks(logits.shape):
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
        for chunk in _logit_chunks(logits.shape):
            grads = (None if g is None else g[chunk] for g in (grad_log_probs, grad_entropy))
            _gradient(logits[chunk], ids[chunk], ctx.temperature, *grads, into=grad[chunk])
        return grad, None, None, None


def head_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what `token_log_probs` returns for the logits hidden @ weight.T, with only one chunk of logits in memory.

    Logits are rounded to the type of `hidden` (..., H), as the head rounds them; everything after that is in fp32 or wider.
    Backward computes the logits of all chunks but the last again. The gradient of a bf16 or fp16 weight (V, H) is the fp32 sum of
    the chunks' products, rounded to its type like any other product.
    """
    if hidden.shape[:-1] != ids.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(
            f"head_log_probs: got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and ids {tuple(ids.shape)}, "
            "expected (..., H), (V, H) and (...)"
        )
    check_temperature(temperature)
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:  # as in a linear map
        hidden, weight = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (hidden, weight))
    figures = _HeadLogProbs.apply(hidden.flatten(0, -2), weight, ids.flatten(), temperature, with_entropy)
    log_probs, entropy = (None if x is None else x.view(ids.shape) for x in figures)
    return log_probs, entropy


@contextmanager
def head_replaced(head: nn.Linear, ids: Tensor, temperature: float, with_entropy: bool) -> Iterator[None]:
    """Make the head of a language model return log-probs of `ids` (...), and the entropy, instead of logits.

    The model's forward still calls the head, so FSDP, for example, gathers its weight as always. The result is (..., 1), or
    (..., 2) with the entropy.
    """

    def forward(hidden: Tensor) -> Tensor:
        figures = head_log_probs(hidden, head.weight, ids, temperature, with_entropy)
        return torch.stack([x for x in figures if x is not None], dim=-1)

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward  # uncovers the class's own


def _read(logits: Tensor, ids: Tensor, temperature: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
    """Read a chunk's logits (N, V): return log-probs of `ids`, the largest logit, the logarithm of the sum, and the entropy.

    Logits are divided by the temperature first. Each result is (N,). The sum is over exp(x - largest): log-probs stay exact
    for large logits because the two are kept apart.
    """
    scaled = logits.to(temperature.dtype) / temperature
    largest = scaled.amax(-1)
    below = scaled - largest.unsqueeze(-1)
    log_sum = below.exp().sum(-1).log()
    every = below - log_sum.unsqueeze(-1)
    log_probs = every.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return log_probs, largest, log_sum
    return log_probs, largest, log_sum, -(every.exp() * every.clamp(min=LOWEST_LOG_PROB)).sum(-1)


def _differentiate(
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    largest: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Overwrite a chunk's logits with their gradient.

    d log p_i / d x_k = [i = k] - p_k; d H / d x_k = -p_k (log p_k + H). Rounded once, because the terms may nearly cancel.
    """
    every = logits.to(temperature.dtype) / temperature - largest.unsqueeze(-1) - log_sum.unsqueeze(-1)
    probs = every.exp()
    chosen = torch.arange(logits.shape[-1], device=logits.device) == ids.unsqueeze(-1)
    slope = (chosen.to(probs.dtype) - probs) * grad_log_probs.unsqueeze(-1)
    if grad_entropy is not None and entropy is not None:
        every = every.clamp(min=LOWEST_LOG_PROB)
        slope = slope - probs * (every + entropy.unsqueeze(-1)) * grad_entropy.unsqueeze(-1)
    logits.copy_(slope / temperature)
    return ()


class _NotCompiledError(Exception):
    """A function that should be compiled ran uncompiled."""


class _Pass:
    """One of the two functions above, compiled if possible, else run slice by slice (Note [passes over logits]).

    `only_compiled` is the same function, but raises `_NotCompiledError` where it would run uncompiled. At the first call of each form
    the compiler tries variants, and keeps page-locked copies of what they overwrite for as long as the process lives. So that call
    has few tokens if the function `overwrites` the logits.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        only_compiled: Callable[..., tuple[Tensor, ...]],
        overwrites: bool = False,
    ) -> None:
        self._function, self._only_compiled = function, only_compiled
        self._overwrites, self._forms = overwrites, set[tuple[Any, ...]]()
        # Compiled at the first call, because the compiler takes time to import.
        self._compiled: Callable[..., tuple[Tensor, ...]] | None = None
        self._may_compile, self._has_compiled, self._has_warned = True, False, False

    def __call__(self, logits: Tensor, ids: Tensor, *others: Any) -> tuple[Tensor, ...]:
        """Run it on a chunk; arguments of shape (N,) are cut as the logits are."""
        if len(ids) and self._may_compile and _can_be_compiled_for(logits):
            form = (logits.dtype, *(x is None for x in others))
            if self._overwrites and form not in self._forms and len(ids) > ALIGNED:
                self._forms.add(form)
                return _by_parts(self, [slice(ALIGNED), slice(ALIGNED, None)], logits, ids, *others)
            # Gradients may be expanded, and each kind of strides would be compiled separately.
            plain = [x.contiguous() if isinstance(x, Tensor) else x for x in (ids, *others)]
            try:
                self._compiled = self._compiled or torch.compile(self._only_compiled, dynamic=True, fullgraph=True)
                results = self._compiled(logits, *plain)
                self._has_compiled = True
                return results
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:  # any reason why the compiler fails here
                self._may_compile = self._has_compiled or isinstance(error, _NotCompiledError)
                self._warn(f"{type(error).__name__}: {error}".splitlines()[0])
        step = max(1, CHUNK_ELEMENTS // logits.shape[1])
        parts = [slice(start, start + step) for start in range(0, max(1, len(ids)), step)]
        return _by_parts(self._function, parts, logits, ids, *others)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("log-probs take longer: torch.compile does not work here (%s)", reason)


def _by_parts(
    function: Callable[..., tuple[Tensor, ...]], parts: list[slice], logits: Tensor, ids: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Run a function on slices of the tokens and put its results together; `others` of shape (N,) are cut as well."""
    results = []
    for part in parts:
        cut = (x[part] if isinstance(x, Tensor) and x.shape == ids.shape else x for x in others)
        results.append(function(logits[part], ids[part], *cut))
    return tuple(torch.cat(each) for each in zip(*results, strict=True))


def _can_be_compiled_for(logits: Tensor) -> bool:
    """On a CPU slices stay in the caches, and compiling takes longer than a whole test."""
    return logits.is_cuda


# Two functions, because the compiler limits the variants per function.
def _read_compiled(*args: Any) -> tuple[Tensor, ...]:
    _require_compiler()
    return _read(*args)


def _differentiate_compiled(*args: Any) -> tuple[Tensor, ...]:
    _require_compiler()
    return _differentiate(*args)


def _require_compiler() -> None:
    # In some modes the compiler runs a function uncompiled, and may complain after everything is written.
    if not torch.compiler.is_compiling():
        raise _NotCompiledError("the compiler is switched off, or a mode is on in which it does nothing")


_read_pass = _Pass(_read, _read_compiled)
_differentiate_pass = _Pass(_differentiate, _differentiate_compiled, overwrites=True)


class _HeadLogProbs(torch.autograd.Function):
    """Backward goes from the last chunk, whose logits forward has kept, to the first."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        count, vocabulary = len(ids_N), len(weight_VH)
        ctx.temperature = torch.full((), temperature, dtype=dtype, device=hidden_NH.device)  # no copy from the host
        ctx.chunks = _token_chunks(count, HEAD_CHUNK_BYTES // (vocabulary * hidden_NH.element_size()))
        figures = [torch.empty_like(ids_N, dtype=dtype) for _ in range(3 + with_entropy)]
        logits = hidden_NH.new_empty(_most_tokens(ctx.chunks), vocabulary)
        for chunk in ctx.chunks:
            of_chunk = torch.mm(hidden_NH[chunk], weight_VH.T, out=logits[: chunk.stop - chunk.start])
            for all_tokens, those in zip(
                figures, _read_pass(of_chunk, ids_N[chunk], ctx.temperature, with_entropy), strict=True
            ):
                all_tokens[chunk] = those
        log_probs, *for_backward = figures
        ctx.save_for_backward(hidden_NH, weight_VH, ids_N, *for_backward)
        # Not a saved tensor: backward writes to it, and offloading a tensor that is needed next gains nothing.
        ctx.logits = logits if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)
        return log_probs, for_backward[2] if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, ids_N, *figures = ctx.saved_tensors
        wide = ctx.temperature.dtype
        logits, ctx.logits = ctx.logits, None  # a second backward over a retained graph finds none
        is_there = logits is not None
        if logits is None:
            logits = hidden_NH.new_empty(_most_tokens(ctx.chunks), len(weight_VH))
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(ids_N, dtype=wide)
        grad_hidden = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # A single product needs no sum.
            grad_weight = torch.empty_like(weight_VH, dtype=wide if len(ctx.chunks) > 1 else None)
        for number, chunk in enumerate(reversed(ctx.chunks)):
            gradient = logits[: chunk.stop - chunk.start]
            if number > 0 or not is_there:
                torch.mm(hidden_NH[chunk], weight_VH.T, out=gradient)
            grads = (None if g is None else g[chunk] for g in (grad_log_probs, grad_entropy))
            _differentiate_pass(gradient, ids_N[chunk], ctx.temperature, *grads, *(x[chunk] for x in figures))
            if grad_hidden is not None:
                torch.mm(gradient, weight_VH, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, hidden_NH[chunk], is_first=number == 0)
            del gradient
        del logits  # before the sum is copied
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VH.dtype), None, None, None


def _token_chunks(count: int, most: int) -> list[slice]:
    """Cut `count` tokens into at least one chunk of at most `most` tokens. All but the first are as large as possible.

    The last chunk, whose logits are kept, is therefore a large one.
    """
    most = max(1, most - most % ALIGNED if most > ALIGNED else most)
    starts = [0, *range(count % most or most, count, most)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]


def _most_tokens(chunks: list[slice]) -> int:
    return chunks[-1].stop - chunks[-1].start


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add a @ b in place, or write it if `is_first`. If `total` is wider than a and b, no second tensor of its size is made."""
    beta = 0 if is_first else 1  # 0: the old contents are not read
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda and torch.version.hip is None:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        step = max(1, SUM_ELEMENTS // total.shape[1] // ALIGNED) * ALIGNED
        for start in range(0, len(total), step):
            part = total[start : start + step]
            product = a[start : start + step] @ b
            part.copy_(product) if is_first else part.add_(product)
