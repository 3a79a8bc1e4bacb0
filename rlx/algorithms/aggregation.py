"""Aggregate per-token losses to one number, by weights and a denominator.

A mini-batch is divided into micro-batches and over processes. Each part sums `token_weights * loss`, and the sum over all parts
is divided once by the sum of the parts' denominators. Both are sums over rows, so the result does not depend on the division.
Shape letters: B samples, T response tokens.
"""

import torch
from torch import Tensor

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _check(mask_BT: Tensor, mode: str) -> None:
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"loss_agg_mode: got {mode!r}, expected one of {', '.join(AGGREGATION_MODES)}")
    if mask_BT.dim() != 2 or mask_BT.dtype != torch.bool:
        raise ValueError(f"mask: got shape {tuple(mask_BT.shape)} {mask_BT.dtype}, expected (B, T) torch.bool")


def token_weights(
    mask_BT: Tensor,
    mode: str,
    horizon: int,
    dtype: torch.dtype = torch.float32,
    sample_tokens_B: Tensor | None = None,
) -> Tensor:
    """Return the weight (B, T) of each token's loss before the division by the denominator.

    `token-mean` and `seq-mean-token-sum` weigh each token 1, `seq-mean-token-mean` 1 / (the sample's tokens),
    `seq-mean-token-sum-norm` 1 / horizon. Weights outside the mask are 0, which hides finite losses there but not NaN.

    Args:
        mask_BT: (B, T) bool, True on tokens that count.
        mode: one of AGGREGATION_MODES.
        horizon: longest response allowed [tokens]; only read by `seq-mean-token-sum-norm`.
        dtype: of the weights, the loss's.
        sample_tokens_B: (B,) int64, tokens that count in all rows of the row's sample; None: each row is a sample.

    Raises:
        ValueError: the mode is unknown, the mask has another type, or a horizon that is read is below 1.

    Source: modes of verl (`agg_loss`); the division by a constant horizon is Dr. GRPO's, arXiv:2503.20783.
    """
    _check(mask_BT, mode)
    weights_BT = mask_BT.to(dtype)
    if mode == "seq-mean-token-mean":
        tokens_B = mask_BT.sum(dim=1) if sample_tokens_B is None else sample_tokens_B
        return weights_BT / tokens_B.clamp(min=1)[:, None]
    if mode == "seq-mean-token-sum-norm":
        if horizon < 1:
            raise ValueError(f"horizon: got {horizon}, expected the longest response in tokens, at least 1")
        return weights_BT / horizon
    return weights_BT


def denominator(mask_BT: Tensor, mode: str, sample_tokens_B: Tensor | None = None) -> Tensor:
    """Return the number to divide the weighted sum of losses by: tokens for `token-mean`, samples for the other modes.

    A row without a token in the mask (B, T) does not count, so rows that are added to keep processes in step change nothing.
    The result is a scalar int64, exact under any order of summation; 0 if no row counts. If samples have several rows, each counts
    as its share of `sample_tokens_B`: then it is fp64, and the sum over whole samples is a whole number but for rounding.
    Raises ValueError as `token_weights`.
    """
    _check(mask_BT, mode)
    if mode == "token-mean":
        return mask_BT.sum()
    if sample_tokens_B is None:
        return mask_BT.any(dim=1).sum()
    return (mask_BT.sum(dim=1).double() / sample_tokens_B.clamp(min=1)).sum()
