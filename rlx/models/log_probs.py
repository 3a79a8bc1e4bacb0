"""Compute log-probs of given tokens, and the entropy: from logits, or from hidden states and the head's weight in chunks.

Note [passes over logits]
Apart from matrix products (logits, gradients of hidden states and of the weight) the whole cost is reading and writing logits. Two
functions therefore do the work, one for forward and one for backward. A compiler turns each into one or two passes without
intermediate results: they move 4 to 8 bytes per bf16 logit, while separate operations move 40. Forward saves 12 bytes per token for
backward: the largest logit, the logarithm of the sum, the entropy. Without a compiler the same functions run on slices that are
small enough for their intermediate results not to matter. On a CPU with a large vocabulary they take about twice the time of
log_softmax, and more memory.

Note [logits in fp32]
In bf16 a logit between 16 and 32 is rounded by up to 0.06. With SmolLM2-135M that made a quarter of the gap to the sampler's
log-probs, whose head is in fp32 too. So the head's product is kept in fp32, and its gradient is rounded to the type of its factors.

Shape letters: N tokens, H width of the hidden states, V vocabulary.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from rlx.models.exact import Kernels

logger = logging.getLogger(__name__)

Part = slice | tuple[int, ...]  # of the tokens
CHUNK_ELEMENTS = 1 << 24  # of a slice: 64 MiB in fp32; a few such temporaries are alive at once
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
    gradient. Logits are (..., V) floating, ids (...) int64 in [0, V). The results are (...), entropy in nats; fp64 for fp64 logits,
    else fp32.
    """
    if logits.shape[:-1] != ids.shape or logits.dim() < 2:
        raise ValueError(
            f"token_log_probs: got logits {tuple(logits.shape)} and ids {tuple(ids.shape)}, expected (..., V) and (...)"
        )
    log_probs, entropy = _TokenLogProbs.apply(logits, ids, temperature, with_entropy)
    return log_probs, entropy


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float,
    with_entropy: bool,
    kernels: "Kernels | None" = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what `token_log_probs` returns for the logits hidden @ weight.T, with only one chunk of logits in memory.

    Logits and everything after them are in fp32 or wider, see Note [logits in fp32]; `hidden` is (..., H). Backward computes the logits
    of all chunks but the last again, and rounds their gradient to the type of `hidden`. The gradient of a bf16 or fp16 weight (V, H)
    is the fp32 sum of the chunks' products, rounded to its type like any other product. With the sampler's `kernels` log-probs are
    its own, to the bit.
    """
    if hidden.shape[:-1] != ids.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(
            f"head_log_probs: got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and ids {tuple(ids.shape)}, "
            "expected (..., H), (V, H) and (...)"
        )
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:  # as in a linear map
        hidden, weight = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (hidden, weight))
    figures = _HeadLogProbs.apply(hidden.flatten(0, -2), weight, ids.flatten(), temperature, with_entropy, kernels)
    log_probs, entropy = (None if x is None else x.view(ids.shape) for x in figures)
    return log_probs, entropy


@contextmanager
def head_replaced(
    head: nn.Linear, ids: Tensor, temperature: float, with_entropy: bool, entropy_in_loss: bool = True
) -> Iterator[None]:
    """Make the head of a language model return log-probs of `ids` (...), and the entropy, instead of logits.

    The model's forward still calls the head, so FSDP, for example, gathers its weight as always. The result is (..., 1), or
    (..., 2) with the entropy. Without `entropy_in_loss` the entropy carries no gradient.
    """

    def forward(hidden: Tensor) -> Tensor:
        kernels = getattr(head, "exact_kernels", None)
        log_probs, entropy = head_log_probs(hidden, head.weight, ids, temperature, with_entropy, kernels)
        if entropy is None:
            return log_probs.unsqueeze(-1)
        return torch.stack([log_probs, entropy if entropy_in_loss else entropy.detach()], dim=-1)

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
    out: Tensor | None,
    largest: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Overwrite a chunk's logits, or `out` (N, V), with their gradient.

    d log p_i / d x_k = [i = k] - p_k; d H / d x_k = -p_k (log p_k + H). Rounded once, because the terms may nearly cancel.
    """
    every = logits.to(temperature.dtype) / temperature - largest.unsqueeze(-1) - log_sum.unsqueeze(-1)
    probs = every.exp()
    chosen = torch.arange(logits.shape[-1], device=logits.device) == ids.unsqueeze(-1)
    slope = (chosen.to(probs.dtype) - probs) * grad_log_probs.unsqueeze(-1)
    if grad_entropy is not None and entropy is not None:
        every = every.clamp(min=LOWEST_LOG_PROB)
        slope = slope - probs * (every + entropy.unsqueeze(-1)) * grad_entropy.unsqueeze(-1)
    (logits if out is None else out).copy_(slope / temperature)
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
        """Run it on a chunk; arguments of N tokens are cut as the logits are."""
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
                if not self._has_warned:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    logger.warning("log-probs take longer: torch.compile does not work here (%s)", reason)
                self._has_warned = True
        step = max(1, CHUNK_ELEMENTS // logits.shape[1])
        parts = [slice(start, start + step) for start in range(0, max(1, len(ids)), step)]
        return _by_parts(self._function, parts, logits, ids, *others)


def _by_parts(
    function: Callable[..., tuple[Tensor, ...]], parts: list[slice], logits: Tensor, ids: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Run a function on slices of the tokens and put its results together; `others` of N tokens are cut as well."""
    results = []
    for part in parts:
        cut = (x[part] if isinstance(x, Tensor) and x.shape[:1] == ids.shape else x for x in others)
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


class _TokenLogProbs(torch.autograd.Function):
    """Only the gradient of the logits, in their type, is as large as they are."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.rows = [*product(*map(range, ids.shape[:-1]))]  # of (N, V) each, because views cannot be reshaped
        figures = _begin(ctx, logits, ids, temperature, with_entropy)
        for row in ctx.rows:
            _fill(figures, row, _read_pass(logits[row], ids[row], ctx.temperature, with_entropy))
        ctx.save_for_backward(logits, ids, *figures[1:])
        return figures[0], figures[3] if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, ids, *figures = ctx.saved_tensors
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device).copy_(logits)
        for row in ctx.rows:
            _overwrite(ctx, gradient[row], None, ids, row, grads, figures)
        return gradient, None, None, None


class _HeadLogProbs(torch.autograd.Function):
    """Backward goes from the last chunk, whose logits forward has kept, to the first."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        ids_N: Tensor,
        temperature: float,
        with_entropy: bool,
        kernels: "Kernels | None",
    ) -> tuple[Tensor, Tensor | None]:
        count, vocabulary = len(ids_N), len(weight_VH)
        figures = _begin(ctx, hidden_NH, ids_N, temperature, with_entropy)
        wide = ctx.temperature.dtype
        each_bytes = wide.itemsize + (hidden_NH.dtype != wide) * hidden_NH.element_size()  # a logit and its gradient
        ctx.chunks = _token_chunks(count, HEAD_CHUNK_BYTES // (vocabulary * each_bytes))
        most = ctx.chunks[-1].stop - ctx.chunks[-1].start
        logits = hidden_NH.new_empty(most, vocabulary, dtype=wide)
        for chunk in ctx.chunks:
            of_chunk, factors = logits[: chunk.stop - chunk.start], (hidden_NH[chunk], weight_VH)
            _write_product(of_chunk, *factors) if kernels is None else kernels.product(*factors, of_chunk)
            _fill(figures, chunk, _read_pass(of_chunk, ids_N[chunk], ctx.temperature, with_entropy))
            if kernels is not None:
                figures[0][chunk] = _sampled(kernels, of_chunk, ids_N[chunk], temperature)
        ctx.save_for_backward(hidden_NH, weight_VH, ids_N, *figures[1:])
        # Not a saved tensor: backward writes to it, and offloading a tensor that is needed next gains nothing.
        ctx.logits = logits if any(ctx.needs_input_grad) else None
        return figures[0], figures[3] if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, ids_N, *figures = ctx.saved_tensors
        wide = ctx.temperature.dtype
        logits, ctx.logits = ctx.logits, None  # a second backward over a retained graph finds none
        is_there = logits is not None
        most = ctx.chunks[-1].stop - ctx.chunks[-1].start
        if logits is None:
            logits = hidden_NH.new_empty(most, len(weight_VH), dtype=wide)
        narrow = None if hidden_NH.dtype == wide else hidden_NH.new_empty(most, len(weight_VH))
        grad_hidden = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # A single product needs no sum.
            grad_weight = torch.empty_like(weight_VH, dtype=wide if len(ctx.chunks) > 1 else None)
        for number, chunk in enumerate(reversed(ctx.chunks)):
            of_chunk = logits[: chunk.stop - chunk.start]
            if number > 0 or not is_there:
                _write_product(of_chunk, hidden_NH[chunk], weight_VH)
            gradient = of_chunk if narrow is None else narrow[: chunk.stop - chunk.start]
            _overwrite(ctx, of_chunk, None if narrow is None else gradient, ids_N, chunk, grads, figures)
            if grad_hidden is not None:
                torch.mm(gradient, weight_VH, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, hidden_NH[chunk], is_first=number == 0)
            del of_chunk, gradient
        del logits, narrow  # before the sum is copied
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VH.dtype), *[None] * 4


def _sampled(kernels: "Kernels", logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return the sampler's log-probs. It divides logits by a number, which rounds otherwise than division by a tensor."""
    if temperature == 1:
        return kernels.token_log_probs(logits, ids)
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = zip(logits.split(step), ids.split(step), strict=True)
    return torch.cat([kernels.token_log_probs(x / temperature, each) for x, each in parts])


def _begin(ctx: Any, inputs: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> list[Tensor]:
    """Prepare a forward; return tensors like `ids` for the results of `_read`. Raises ValueError for a temperature that is none."""
    if not torch.finfo(torch.float32).tiny <= temperature < math.inf:  # anything less is 0 or denormal in fp32
        raise ValueError(f"temperature: got {temperature}, expected a finite number above 0")
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    ctx.temperature = torch.full((), temperature, dtype=dtype, device=inputs.device)  # no copy from the host
    ctx.set_materialize_grads(False)
    return [torch.empty_like(ids, dtype=dtype) for _ in range(3 + with_entropy)]


def _fill(figures: list[Tensor], part: Part, of_part: tuple[Tensor, ...]) -> None:
    for whole, own in zip(figures, of_part, strict=True):
        whole[part] = own


def _overwrite(
    ctx: Any,
    logits: Tensor,
    out: Tensor | None,
    ids: Tensor,
    part: Part,
    grads: tuple[Tensor | None, ...],
    figures: list[Tensor],
) -> None:
    """Overwrite the logits of a part of the tokens, or `out`, with their gradient."""
    of_log_probs, of_entropy = (None if grad is None else grad[part] for grad in grads)
    if of_log_probs is None:
        of_log_probs = torch.zeros_like(ids[part], dtype=ctx.temperature.dtype)
    # Without a gradient of the entropy it runs the function that is compiled for log-probs alone.
    own = (x[part] for x in (figures[:2] if of_entropy is None else figures))
    _differentiate_pass(logits, ids[part], ctx.temperature, of_log_probs, of_entropy, out, *own)


def _token_chunks(count: int, most: int) -> list[slice]:
    """Cut `count` tokens into at least one chunk of at most `most` tokens. All but the first are as large as possible.

    The last chunk, whose logits are kept, is therefore a large one.
    """
    most = max(1, most - most % ALIGNED if most > ALIGNED else most)
    starts = [0, *range(count % most or most, count, most)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]


def _write_product(out: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Write hidden @ weight.T to `out`, which may be wider than both, and return it."""
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight.T, out=out)
    if out.is_cuda and torch.version.hip is None:
        return torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
    hidden, step = hidden.to(out.dtype), max(1, SUM_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        torch.mm(hidden, weight[part].to(out.dtype).T, out=out[:, part])
    return out


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
