"""Attention over a packed row whose sequences are paths of a tree, without copies of the keys and values that they share.

Note [merged reads]
A token attends to its own segment in one call of a kernel, and to the segments that its own one continues in others. With
outputs o_i and log-sum-exps l_i of the calls, L = log sum exp l_i and o = sum exp(l_i - L) o_i are those of one softmax over all
keys (as in FlashAttention's own blocks, arXiv:2205.14135, section 3). In backward a kernel computes its weights as
exp(score - L), and the softmax's correction from the output: with the merged L and o each call's gradients are exact parts of
the whole. Those of a key and of a query add up over the calls.

The kernels are operators of torch without a public form: `scaled_dot_product_attention` and `varlen_attn` call them, but neither
gives or takes a log-sum-exp with its gradient. Signatures hold for torch 2.11 to 2.13; tests/models/test_attention_kernels.py fails
where a release changes one.

Shape letters: H heads, N tokens of the row or queries, M keys, D width of a head, S pairs of queries and keys, in their order.
Tensors of kernels are token-major, (N, H, D). The log-sum-exp is (H, N), in fp32, or fp64 for fp64.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlx.models.prefix_tree import Pair, Read, Span, Tree, joined

ops = torch.ops.aten
Places = slice | Tensor
COPIED = 1024  # keys before a segment are copied up to this number; merging the results of two calls costs as much
# cuDNN's kernel is faster than FlashAttention 2 on single pairs with at least so many products of elements in their scores, all
# heads together. It needs 0.1 s to plan for a pair of lengths, so it gets multiples of ROUND only; FlashAttention computes the rest.
LARGE, ROUND = 3 * 10**10, 1024
MOST_BYTES = 16 << 20  # larger tensors are copied with a wait: torch keeps the page-locked memory of the others


@dataclass(frozen=True)
class Call:
    """Everything of a call but its tensors."""

    query_lengths: tuple[int, ...]  # of the S pairs, each at least 1: some kernels fail without queries or keys
    key_lengths: tuple[int, ...]
    is_causal: bool  # the last query of a pair sees all its keys, each earlier one a key less
    window: int | None  # keys that a query of a causal call sees at most; None: all
    scaling: float  # of the scores
    device: torch.device  # of the tensors

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Where pairs begin among queries and among keys, (S + 1,) int32 each, and the largest lengths."""
        starts = (
            to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), self.device)
            for lengths in (self.query_lengths, self.key_lengths)
        )
        return *starts, max(self.query_lengths), max(self.key_lengths)

    @property
    def options(self) -> dict[str, float | int]:
        left, right = (-1 if self.window is None else self.window - 1), (0 if self.is_causal else -1)
        return {"scale": self.scaling, "window_size_left": left, "window_size_right": right}

    def pieces(self) -> list[tuple[slice, slice]]:
        bounds = (pairwise(accumulate(lengths, initial=0)) for lengths in (self.query_lengths, self.key_lengths))
        return [(slice(*queries), slice(*keys)) for queries, keys in zip(*bounds, strict=True)]


class Kernel:
    """Attention with its log-sum-exp, and its backward from any output and log-sum-exp; here by a call for each pair."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output (N, H, D) and the log-sum-exp (H, N)."""
        found = [self.of_pair(query[queries], key[keys], value[keys], call) for queries, keys in call.pieces()]
        if len(found) == 1:
            return found[0]
        outputs, sums = zip(*found, strict=True)
        return torch.cat(outputs), torch.cat(sums, dim=1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value for weights exp(score - lse), in the arguments' dtype."""
        found = []
        for queries, keys in call.pieces():
            of_output = grad[queries], query[queries], key[keys], value[keys], output[queries]
            grads = self.grads_of_pair(of_output, lse[None, :, queries], call)
            found.append([_tokens_first(x) for x in grads])
        one, two, three = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
        return one, two, three

    def of_pair(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def grads_of_pair(self, of_output: tuple[Tensor, ...], lse: Tensor, call: Call) -> tuple[Tensor, ...]:
        """Return gradients with heads first, from (grad, query, key, value, output) and `lse` (1, H, N)."""
        raise NotImplementedError


class CpuFlash(Kernel):
    """torch's blockwise kernel for the CPU."""

    def of_pair(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = (_heads_first(x) for x in (query, key, value))
        output, lse = ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=_mask(q, k, call), scale=call.scaling
        )
        return _tokens_first(output), lse[0]

    def grads_of_pair(self, of_output: tuple[Tensor, ...], lse: Tensor, call: Call) -> tuple[Tensor, ...]:
        do, q, k, v, o = map(_heads_first, of_output)
        return ops._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, False, attn_mask=_mask(q, k, call), scale=call.scaling
        )


class CudaFlash(Kernel):
    """FlashAttention 2, one call for all pairs."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return ops._flash_attention_forward(
            query, key, value, *call.bounds, 0.0, call.is_causal and call.window is None, False, **call.options
        )[:2]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        of_output = (grad, query, key, value, output, lse.contiguous())
        return ops._flash_attention_backward(
            *of_output, *call.bounds, 0.0, call.is_causal and call.window is None, *random, **call.options
        )


class CudnnFlash(Kernel):
    """cuDNN's kernel, which has no windows, and is causal only for as many queries as keys.

    Note [layouts of cuDNN's plans]
    torch finds the plan of a backward again by the sizes and strides of query, key and value. So output and gradient must have
    the layout in which forward returns the output, that of the query. With another one the gradients of queries and keys are
    wrong by their own size, for any width and number of heads: either here or in `scaled_dot_product_attention`, which uses
    the same plans.
    """

    def of_pair(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = (_heads_first(x) for x in (query, key, value))
        output, lse, *_ = ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, call.is_causal, False, scale=call.scaling
        )
        return _tokens_first(output), lse.view(lse.shape[1], -1)

    def grads_of_pair(self, of_output: tuple[Tensor, ...], lse: Tensor, call: Call) -> tuple[Tensor, ...]:
        grad, query, key, value, output = of_output
        inputs = map(_heads_first, (_as(query, grad), query, key, value, _as(query, output)))
        random = torch.zeros(2, 1, dtype=torch.int64, device=query.device).unbind()
        rest = (None, None, None, len(query), len(key), 0.0, call.is_causal)  # no bias, and one pair of these lengths
        return ops._scaled_dot_product_cudnn_attention_backward(
            *inputs, lse[..., None].contiguous(), *random, *rest, scale=call.scaling
        )


@cache
def has_flash(device: torch.device, dtype: torch.dtype, query_width: int, value_width: int) -> bool:
    """Return whether FlashAttention 2 computes tensors of this type, with heads of these widths, on this device."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and query_width == value_width <= 256
        and query_width % 8 == 0
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
    )


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _tokens_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def _as(query: Tensor, x: Tensor) -> Tensor:
    """Return a tensor in the layout of an output for this query; see Note [layouts of cuDNN's plans]."""
    layout = torch.empty_like(query)
    return x if x.stride() == layout.stride() else layout.copy_(x)


def _mask(query: Tensor, key: Tensor, call: Call) -> Tensor | None:
    """Return what a causal call adds to the scores, (N, M)."""
    if not call.is_causal:
        return None
    count, keys = query.shape[2], key.shape[2]
    behind = torch.arange(keys - count, keys)[:, None] - torch.arange(keys)
    hidden = behind < 0 if call.window is None else (behind < 0) | (behind >= call.window)
    return torch.zeros(count, keys, dtype=query.dtype).masked_fill_(hidden, -torch.inf)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor in the order of the current stream; on CUDA without a wait, after which the device would be idle."""
    if device.type != "cuda" or x.device.type != "cpu" or x.nbytes > MOST_BYTES:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class Step(NamedTuple):
    """A call of a kernel on some of the row's tokens; `adds` as in `Read`."""

    kernel: Kernel
    queries: Places
    keys: Places
    call: Call
    adds: bool


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tree,
    scaling: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention in which each token attends to itself, the earlier tokens of its segment, and those that it continues.

    Keys and values that many tokens share are not copied. At most `COPIED` tokens before a segment are, or a window's if that
    is shorter than a sequence, and whole paths for what the kernels lack: dropout, values of another width than keys, fp32 on
    CUDA. Arguments and result as of `packed_attention`.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if window is not None and window >= tree.longest:
        window = None
    kernels = kernels_for(query, key, value) if dropout == 0 else []
    if not kernels:
        return _by_paths(query, key, value, tree, scaling, window, dropout)
    side = isqrt(LARGE // (query.shape[1] * query.shape[3]))  # of the smallest square that is large
    steps = tree.made(
        (query.device, window, scaling, len(kernels), side),
        lambda: steps_of(tree, kernels, query.device, scaling, window, side),
    )
    result: Tensor = _TreeAttention.apply(*(x[0].transpose(0, 1) for x in (query, key, value)), steps)
    return result[None]


def kernels_for(query: Tensor, key: Tensor, value: Tensor) -> list[Kernel]:
    """Return the kernels for tensors like these: for several pairs in one call and, if it is another one, for single pairs."""
    width = query.shape[-1]
    if width != value.shape[-1]:
        return []
    if query.device.type == "cpu":
        return [CpuFlash()]
    if not has_flash(query.device, query.dtype, width, width):
        return []
    has_cudnn = width in (64, 128) and torch.cuda.get_device_capability(query.device) >= (9, 0)
    # FlashAttention adds up the gradients of queries in one order if torch is set to be deterministic; cuDNN cannot here.
    has_cudnn = has_cudnn and not torch.are_deterministic_algorithms_enabled()
    return [CudaFlash(), CudnnFlash()] if has_cudnn else [CudaFlash()]


def steps_of(
    tree: Tree, kernels: list[Kernel], device: torch.device, scaling: float, window: int | None, side: int
) -> list[Step]:
    """Return the calls that compute the attention of a tree; a second kernel gets pairs of at least `side` x `side` scores."""
    has_large = len(kernels) > 1 and window is None
    tree = tree.cut(ROUND, side) if has_large else tree
    steps = []
    for read in tree.reads(window, COPIED):
        large, small = _by_size(read, side) if has_large else ([], read.pairs)
        parts = [*([(kernels[0], small)] if small else []), *((kernels[-1], [pair]) for pair in large)]
        for kernel, pairs in parts:
            both = [*zip(*pairs, strict=True)]  # the spans of queries, and those of keys, of each pair
            lengths = (tuple(map(_tokens, each)) for each in both)
            places = (_places([span for spans in each for span in spans], device) for each in both)
            call = Call(*lengths, read.is_causal, window, scaling, device)
            steps.append(Step(kernel, *places, call, read.adds))
    return steps


def _by_size(read: Read, side: int) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs for a kernel that takes large ones of round lengths, one in a call, and the rest of all pairs."""
    large, small = [], []
    for queries, keys in read.pairs:
        rest = []
        for span in queries:
            part = span.tokens - span.tokens % ROUND
            is_square = keys == (span,) and part == span.tokens
            is_round = is_square if read.is_causal else _tokens(keys) % ROUND == 0 and len(keys) == 1
            if is_round and part * _tokens(keys) >= side**2:
                large.append(Pair((Span(span.first, span.first + part),), keys))
                span = Span(span.first + part, span.stop)
            rest += [span] if span.tokens else []
        small += [Pair(tuple(rest), keys)] if rest else []
    return large, small


def _tokens(spans: tuple[Span, ...]) -> int:
    return sum(span.tokens for span in spans)


def _places(spans: list[Span], device: torch.device) -> Places:
    """Return the tokens of spans as a slice if they are neighbours, else as indices."""
    spans = list(joined(spans))
    if len(spans) == 1:
        return slice(*spans[0])
    return torch.cat([torch.arange(*span, device=device) for span in spans])


class _TreeAttention(torch.autograd.Function):
    """Runs the steps and merges their results; see Note [merged reads]. Tensors are (N, H, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, steps: list[Step]) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        # With one merge per token at most the sum is rounded once, directly.
        is_deep = sum(step.adds for step in steps) > 1
        output = torch.empty_like(query, dtype=wide if is_deep else None, memory_format=torch.contiguous_format)
        lse = torch.empty(query.shape[1], query.shape[0], dtype=wide, device=query.device)
        for step in steps:
            part, part_lse = step.kernel.forward(query[step.queries], key[step.keys], value[step.keys], step.call)
            if step.adds:
                before, lse_before = output[step.queries], lse[:, step.queries]
                part, part_lse = merged(before, lse_before, part, part_lse)
            output[step.queries], lse[:, step.queries] = part.to(output.dtype), part_lse
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.steps = steps
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grad = grad.contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        query_grad = torch.empty_like(query, memory_format=torch.contiguous_format)
        # A key has gradients from many segments: their sum is rounded once.
        of_keys = [torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (key, value)]
        for step in ctx.steps:
            read = (query[step.queries], key[step.keys], value[step.keys])
            of_output = output[step.queries], lse[:, step.queries]
            part, *parts = step.kernel.backward(grad[step.queries], *read, *of_output, step.call)
            query_grad[step.queries] = query_grad[step.queries] + part if step.adds else part
            for whole, of_part in zip(of_keys, parts, strict=True):
                if isinstance(step.keys, slice):
                    whole[step.keys] += of_part
                else:
                    whole.index_add_(0, step.keys, of_part.to(wide))
        return query_grad, *(x.to(query.dtype) for x in of_keys), None


def merged(one: Tensor, lse_one: Tensor, other: Tensor, lse_other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (N, H, D) and log-sum-exp (H, N) over the keys of both, in fp32 or wider."""
    lse = torch.logaddexp(lse_one, lse_other)
    share_one, share_other = ((x - lse).exp_().t()[..., None] for x in (lse_one, lse_other))
    return (one * share_one).add_(other * share_other), lse


def _by_paths(
    query: Tensor, key: Tensor, value: Tensor, tree: Tree, scaling: float, window: int | None, dropout: float
) -> Tensor:
    """Return the same with torch's public function, a call for each segment with copies of its path's keys and values."""
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    outputs = []
    for (queries,), spans in tree.reads(window or tree.starts[-1])[0].pairs:
        k, v = (torch.cat([x[:, :, slice(*span)] for span in spans], dim=2) for x in (key, value))
        behind = torch.arange(k.shape[2] - queries.tokens, k.shape[2], device=k.device)[:, None]
        behind = behind - torch.arange(k.shape[2], device=k.device)
        mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        q = query[:, :, slice(*queries)]
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2))
    return torch.cat(outputs, dim=1)
