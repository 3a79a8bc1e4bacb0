"""Attention over a packed row whose sequences are paths of a tree, without copies of the keys and values that they share.

Note [merged reads]
A token attends to its own segment in one call of a kernel, and to the segments that its own one continues in others. With
outputs o_i and log-sum-exps l_i of the calls, L = log sum exp l_i and o = sum exp(l_i - L) o_i are those of one softmax over all
keys (as in FlashAttention's own blocks, arXiv:2205.14135, section 3). In backward a kernel computes its weights as
exp(score - L), and the softmax's correction from the output: with the merged L and o each call's gradients are exact parts of
the whole. Those of a key and of a query add up over the calls.

Shape letters: H heads, N tokens of the row, D width of a head.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlx.models.attention_kernels import Call, CpuFlash, CudaFlash, CudnnFlash, Kernel, has_flash
from rlx.models.prefix_tree import Pair, Read, Span, Tree, joined

Places = slice | Tensor
COPIED = 1024  # keys before a segment are copied up to this number; merging the results of two calls costs as much
# cuDNN's kernel is faster than FlashAttention 2 on single pairs of at least LARGE x LARGE scores. It needs 0.1 s to plan for a
# pair of lengths, so it gets multiples of ROUND only; FlashAttention computes the rest.
LARGE, ROUND = 2048, 1024


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
    CUDA.

    Args:
        query: (1, H, N, D).
        key, value: (1, H or a divisor of it, N, D); D of value may differ.
        tree: of the N tokens.
        scaling: of the scores; None: D ** -0.5.
        window: number of tokens to attend to, including the token itself; None: all.
        dropout: rate on the weights.

    Returns:
        (1, N, H, D of value).
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if window is not None and window >= tree.longest:
        window = None
    kernels = kernels_for(query, key, value) if dropout == 0 else []
    if not kernels:
        return _by_paths(query, key, value, tree, scaling, window, dropout)
    steps = tree.made(
        (query.device, window, scaling, len(kernels)), lambda: steps_of(tree, kernels, query.device, scaling, window)
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
    is_faster = width == 128 and key.shape[1] < query.shape[1]  # not measured for other heads
    has_cudnn = is_faster and torch.cuda.get_device_capability(query.device) >= (9, 0)
    # FlashAttention adds up the gradients of queries in one order if torch is told so; cuDNN has no such choice here.
    has_cudnn = has_cudnn and not torch.are_deterministic_algorithms_enabled()
    return [CudaFlash(), CudnnFlash()] if has_cudnn else [CudaFlash()]


def steps_of(tree: Tree, kernels: list[Kernel], device: torch.device, scaling: float, window: int | None) -> list[Step]:
    """Return the calls that compute the attention of a tree."""
    has_large = len(kernels) > 1 and window is None
    tree = tree.cut(ROUND, LARGE) if has_large else tree
    steps = []
    for read in tree.reads(window, COPIED):
        large, small = _by_size(read) if has_large else ([], read.pairs)
        parts = [*([(kernels[0], small)] if small else []), *((kernels[-1], [pair]) for pair in large)]
        for kernel, pairs in parts:
            call = Call(
                tuple(_tokens(pair.queries) for pair in pairs),
                tuple(_tokens(pair.keys) for pair in pairs),
                read.is_causal,
                window,
                scaling,
                device,
            )
            queries = _places([span for pair in pairs for span in pair.queries], device)
            keys = _places([span for pair in pairs for span in pair.keys], device)
            steps.append(Step(kernel, queries, keys, call, read.adds))
    return steps


def _by_size(read: Read) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs for a kernel that takes large ones of round lengths, one in a call, and the rest of all pairs."""
    large, small = [], []
    for queries, keys in read.pairs:
        rest = []
        for span in queries:
            part = span.tokens - span.tokens % ROUND
            is_square = keys == (span,) and part == span.tokens
            is_round = is_square if read.is_causal else _tokens(keys) % ROUND == 0 and len(keys) == 1
            if is_round and part * _tokens(keys) >= LARGE**2:
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
