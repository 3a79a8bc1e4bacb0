"""Attention kernels that give their log-sum-exp and take it in backward: operators of torch without a public form.

`scaled_dot_product_attention` and `varlen_attn` call the same operators, but neither gives or takes a log-sum-exp with its
gradient. Signatures hold for torch 2.11 to 2.13; tests/models/test_attention_kernels.py fails where a release changes one.

Shape letters: H heads, N queries, M keys, D width of a head, S pairs of queries and keys, in their order. All tensors are
token-major, (N, H, D). The log-sum-exp is (H, N), in fp32, or fp64 for fp64.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

ops = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """Everything of a call but its tensors.

    Args:
        query_lengths, key_lengths: of the S pairs, each at least 1: some kernels fail without queries or keys.
        is_causal: the last query of a pair sees all its keys, each earlier one a key less.
        window: keys that a query of a causal call sees at most; None: all.
        scaling: of the scores.
        device: of the tensors.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool
    window: int | None
    scaling: float
    device: torch.device

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
        """The arguments of FlashAttention 2 by name."""
        left, right = (-1 if self.window is None else self.window - 1), (0 if self.is_causal else -1)
        return {"scale": self.scaling, "window_size_left": left, "window_size_right": right}

    def pieces(self) -> list[tuple[slice, slice]]:
        """Return each pair's queries and keys."""
        bounds = (pairwise(accumulate(lengths, initial=0)) for lengths in (self.query_lengths, self.key_lengths))
        return [(slice(*queries), slice(*keys)) for queries, keys in zip(*bounds, strict=True)]


class Kernel(Protocol):
    """Attention with its log-sum-exp, and its backward from any output and log-sum-exp."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output (N, H, D) and the log-sum-exp (H, N)."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value for weights exp(score - lse), in the arguments' dtype."""
        ...


class CpuFlash:
    """torch's blockwise kernel for the CPU, a call for each pair."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        outputs, sums = [], []
        for queries, keys in call.pieces():
            q, k, v = _heads_first(query[queries]), _heads_first(key[keys]), _heads_first(value[keys])
            mask = _mask(q, k, call)
            output, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=call.scaling)
            outputs.append(_tokens_first(output))
            sums.append(lse[0])
        return torch.cat(outputs), torch.cat(sums, dim=1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel."""
        found = []
        for queries, keys in call.pieces():
            q, k, v = _heads_first(query[queries]), _heads_first(key[keys]), _heads_first(value[keys])
            of_output = (_heads_first(grad[queries]), q, k, v, _heads_first(output[queries]), lse[None, :, queries])
            grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
                *of_output, 0.0, False, attn_mask=_mask(q, k, call), scale=call.scaling
            )
            found.append([_tokens_first(x) for x in grads])
        query_grad, key_grad, value_grad = (torch.cat(parts) for parts in zip(*found, strict=True))
        return query_grad, key_grad, value_grad


class CudaFlash:
    """FlashAttention 2, one call for all pairs."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        output, lse, *_ = ops._flash_attention_forward(
            query, key, value, *call.bounds, 0.0, call.is_causal and call.window is None, False, **call.options
        )
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel."""
        random = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        of_output = (grad, query, key, value, output, lse.contiguous())
        found: tuple[Tensor, Tensor, Tensor] = ops._flash_attention_backward(
            *of_output, *call.bounds, 0.0, call.is_causal and call.window is None, *random, **call.options
        )
        return found


class CudnnFlash:
    """cuDNN's kernel, a call for each pair; it has no windows, and is causal only for as many queries as keys.

    Note [layouts of cuDNN's plans]
    torch finds the plan of a backward again by the sizes and strides of query, key and value. So output and gradient must have
    the layout in which forward returns the output, that of the query. With another one the gradients of queries and keys are
    wrong by their own size, for any width and number of heads: either here or in `scaled_dot_product_attention`, which uses
    the same plans.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        outputs, sums = [], []
        for queries, keys in call.pieces():
            q, k, v = _heads_first(query[queries]), _heads_first(key[keys]), _heads_first(value[keys])
            output, lse, *_ = ops._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, call.is_causal, False, scale=call.scaling
            )
            outputs.append(_tokens_first(output))
            sums.append(lse.view(lse.shape[1], -1))
        return (outputs[0], sums[0]) if len(sums) == 1 else (torch.cat(outputs), torch.cat(sums, dim=1))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel."""
        found = []
        random = torch.zeros(2, 1, dtype=torch.int64, device=query.device).unbind()
        for queries, keys in call.pieces():
            q, k, v = _heads_first(query[queries]), _heads_first(key[keys]), _heads_first(value[keys])
            of_lse = lse[None, :, queries, None].contiguous()
            grad_q, output_q = (_as(query[queries], x[queries]) for x in (grad, output))
            of_output = (_heads_first(grad_q), q, k, v, _heads_first(output_q), of_lse)
            sizes = (None, None, None, q.shape[2], k.shape[2])  # no bias, and one pair of these lengths
            grads = ops._scaled_dot_product_cudnn_attention_backward(
                *of_output, *random, *sizes, 0.0, call.is_causal, scale=call.scaling
            )
            found.append([_tokens_first(x) for x in grads])
        if len(found) == 1:
            return found[0][0], found[0][1], found[0][2]
        query_grad, key_grad, value_grad = (torch.cat(parts) for parts in zip(*found, strict=True))
        return query_grad, key_grad, value_grad


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


MOST_BYTES = 16 << 20
"""Larger tensors are copied with a wait: torch keeps the page-locked memory of the others for later copies."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, copied in the order of the current stream; on CUDA the host goes on at once.

    A blocking copy lets the device finish first. Then it idles while the host launches a small model's kernels one by one.
    """
    if device.type != "cuda" or x.device.type != "cpu" or x.nbytes > MOST_BYTES:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
