"""Turns of a conversation: runs of tokens that the policy wrote. Shape letters: B rows, T tokens, K turns.

A turn begins where `mask` (B, T) bool is True behind a token outside it, or in the first place.
"""

import torch
from torch import Tensor


def turn_index(mask_BT: Tensor) -> Tensor:
    """Return the index of each token's turn, from 0 in each row, and -1 outside the mask: (B, T) int64."""
    index_BT = turn_starts(mask_BT).cumsum(dim=1) - 1
    return torch.where(mask_BT, index_BT, -1)


def turn_starts(mask_BT: Tensor) -> Tensor:
    """Return where turns begin (B, T) bool."""
    starts_BT = mask_BT.clone()
    starts_BT[:, 1:] &= ~mask_BT[:, :-1]
    return starts_BT


def sums_by_turn(x_BT: Tensor, index_BT: Tensor) -> Tensor:
    """Return the sum of each turn's entries (B, K) in the dtype of `x`, K being the most turns of a row; at least 1."""
    turns = max(int(index_BT.max()) + 1, 1) if index_BT.numel() else 1
    sums_BK = x_BT.new_zeros(len(x_BT), turns)
    return sums_BK.scatter_add_(1, index_BT.clamp(min=0), torch.where(index_BT >= 0, x_BT, 0.0))


def on_tokens(x_BK: Tensor, index_BT: Tensor) -> Tensor:
    """Return each turn's number on all its tokens (B, T), 0 outside turns."""
    return torch.where(index_BT >= 0, x_BK.gather(1, index_BT.clamp(min=0)), 0.0)
