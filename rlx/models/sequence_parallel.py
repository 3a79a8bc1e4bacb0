"""Sequence parallelism by exchanging heads for tokens (Ulysses).

Outside attention each process holds a part of a row's tokens, inside attention all tokens of a part of the heads.

Shape letters: P processes of a group, H heads, N tokens of the row, D width of a head. Source: DeepSpeed-Ulysses,
arXiv:2309.14509, section 3.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send heads to the other processes of the group in exchange for their tokens; all processes call it together.

    Args:
        x: (1, H, N / P, D), this process's tokens. If P does not divide H, as with keys and values that several query heads
            share, each head is repeated up to the least common multiple.
        group: its processes hold neighbouring parts of the row, in the order of their ranks.

    Returns:
        (1, H' / P, N, D), with H' = lcm(H, P).
    """
    size = dist.get_world_size(group)
    heads = math.lcm(x.shape[1], size)
    x = x.repeat_interleave(heads // x.shape[1], dim=1)
    parts = x.unflatten(1, (size, -1)).transpose(0, 1)  # (P, 1, H'/P, N/P, D): one for each process
    return _ToEach.apply(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reverse the exchange: return all heads of this process's own tokens.

    Args:
        x: (1, N, H / P, D), all tokens of a part of the heads.
        group: as in `heads_for_tokens`.

    Returns:
        (1, N / P, H, D).
    """
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)  # (P, 1, N/P, H/P, D)
    return _ToEach.apply(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the group. Each process has 0 outside its own part; backward returns that part.

    Every process of the group must continue with the same computation on the sum.
    """
    return _Joined.apply(x, group)


class _ToEach(torch.autograd.Function):
    """Sends part p of dimension 0 to process p, and receives that process's part in its place."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
