"""Measure the mismatch between sampler and trainer, and correct the policy loss for it.

Both have the same weights but compute with other kernels and types, so the tokens come from another distribution than the loss
assumes. With d = trainer's log-prob - sampler's log-prob of a sampled token, its ratio is r = exp(d). Everything here is a
function of d over the tokens of the mask. Shape letters: B samples, T response tokens.

All functions take `trainer` (B, T) and `sampler` (B, T), the log-probs of the sampled tokens, and `mask_BT` (B, T) bool, True on
response tokens; entries elsewhere are not read. They raise ValueError if the shapes differ or the mask has another type.

All is computed in fp64, in which the order of a sum changes no digit that matters. Log-ratios are clamped to +-EXP_LIMIT before
exp, so that squares stay finite. Nothing carries a gradient.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

EXP_LIMIT = 300.0
RATIO_LIMIT = 2.0  # a token with a ratio outside [1 / RATIO_LIMIT, RATIO_LIMIT] counts in `ratio_beyond_2`

WEIGHT_LEVELS = ("token", "sequence")
RATIO_CRITERIA = ("token_k1", "seq_sum_k1", "seq_mean_k1")  # bounded on both sides
DIVERGENCE_CRITERIA = ("seq_mean_k3", "seq_max_k2")  # bounded above


def _log_ratio(trainer: Tensor, sampler: Tensor, mask_BT: Tensor) -> Tensor:
    """Return d (B, T) in fp64, 0 outside the mask."""
    if not trainer.shape == sampler.shape == mask_BT.shape or mask_BT.dim() != 2 or mask_BT.dtype != torch.bool:
        shapes = [tuple(x.shape) for x in (trainer, sampler, mask_BT)]
        raise ValueError(
            f"log-probs and mask: got {shapes} {mask_BT.dtype}, expected three of shape (B, T), the mask of type bool"
        )
    return (trainer.detach().double() - sampler.detach().double()).masked_fill(~mask_BT, 0.0)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()


def _k3(log_ratio: Tensor) -> Tensor:
    log_ratio = log_ratio.clamp(max=EXP_LIMIT)
    return log_ratio.expm1() - log_ratio


# Measuring --------------------------------------------------------------------------------------------------------


def mismatch_sums(trainer: Tensor, sampler: Tensor, mask_BT: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sums over rows for `mismatch_figures`; the sums of a batch's parts add up to those of the whole.

    Returns:
        Scalars fp64: the sums, and the largest |d|, whose maximum over parts is that of the whole.
    """
    d = _log_ratio(trainer, sampler, mask_BT)
    no_BT, no_B = ~mask_BT, ~mask_BT.any(dim=1)
    ratio_BT, ratio_B = _exp(d).masked_fill(no_BT, 0.0), _exp(d.sum(dim=1)).masked_fill(no_B, 0.0)
    # Computed one by one, because the driver's batch is large and each of these is as large in fp64.
    sums = {
        "tokens": mask_BT.sum().double(),
        "sequences": (~no_B).sum().double(),
        "abs": d.abs().sum(),
        "k1": -d.sum(),
        "k3": _k3(d).sum(),
        "beyond": (d.abs() > math.log(RATIO_LIMIT)).sum().double(),
        "ratio": ratio_BT.sum(),
        "ratio_squared": ratio_BT.square().sum(),
        "sequence_ratio": ratio_B.sum(),
        "sequence_ratio_squared": ratio_B.square().sum(),
        "trainer": trainer.detach().masked_fill(no_BT, 0.0).sum(dtype=torch.float64),
        "sampler": sampler.detach().masked_fill(no_BT, 0.0).sum(dtype=torch.float64),
    }
    return sums, d.abs().max() if d.numel() else d.sum()


def mismatch_figures(sums: Mapping[str, float], largest: float) -> dict[str, float]:
    """Return the mismatch of a batch.

    Args:
        sums, largest: of `mismatch_sums`, over the whole batch.

    Returns:
        `mean_abs_log_prob`, `max_abs_log_prob`: of |d| [nats].
        `kl_k1` = mean of -d and `kl_k3` = mean of r - 1 - d: both estimate KL(sampler || trainer) per token [nats], because
        the tokens are the sampler's; the second is never negative and varies less.
        `ess_token`, `ess_sequence`: effective sample size (sum w)^2 / sum w^2 as a share of the tokens (w = r) and of the
        sequences (w = product of r): the part of the batch that remains when it is weighted to the trainer's distribution.
        `ratio_beyond_2`: share of tokens with r outside [1/2, 2].
        `perplexity_trainer`, `perplexity_sampler`: exp(-mean log-prob) of the tokens.
        Empty without tokens.

    Source: k1 and k3, J. Schulman, http://joschu.net/blog/kl-approx.html; as a measure of this mismatch Liu et al. 2025,
    https://richardli.xyz/rl-collapse, section 3.1; effective sample size, Kong 1992, see arXiv:1809.04129.
    """
    tokens = sums["tokens"]
    if tokens == 0:
        return {}
    return {
        "mean_abs_log_prob": sums["abs"] / tokens,
        "max_abs_log_prob": largest,
        "kl_k1": sums["k1"] / tokens,
        "kl_k3": sums["k3"] / tokens,
        "ess_token": _effective_share(sums["ratio"], sums["ratio_squared"], tokens),
        "ess_sequence": _effective_share(sums["sequence_ratio"], sums["sequence_ratio_squared"], sums["sequences"]),
        "ratio_beyond_2": sums["beyond"] / tokens,
        "perplexity_trainer": _perplexity(sums["trainer"] / tokens),
        "perplexity_sampler": _perplexity(sums["sampler"] / tokens),
    }


def _effective_share(total: float, squares: float, count: float) -> float:
    return total / count * (total / squares) if squares > 0 else 0.0


def _perplexity(mean_log_prob: float) -> float:
    return math.exp(min(-mean_log_prob, EXP_LIMIT))


# Correcting -------------------------------------------------------------------------------------------------------


def importance_weights(
    trainer: Tensor, sampler: Tensor, mask_BT: Tensor, level: str, low: float | None, high: float, normalize: bool
) -> Tensor:
    """Return factors of each token's policy loss that make the sampler's tokens count as the trainer's.

    With w = r of the token, or the product of r over its sequence:

    - truncated importance sampling (`low` is None): min(w, high).
    - IcePop's mask: w if low <= w <= high, else 0.

    Args:
        trainer, sampler, mask_BT: as above.
        level: `token` or `sequence`.
        low: None, or the lower bound of weights that are kept.
        high: cap, or the upper bound of weights that are kept.
        normalize: divide by the mean weight, over tokens or over sequences, unless all weights are 0.

    Returns:
        (B, T) fp32 >= 0 without gradient, 0 outside the mask; exactly 1 for equal log-probs.

    Raises:
        ValueError: also if the level is unknown.

    Source: token level, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    https://fengyao.notion.site/off-policy-rl, after Ionides 2008; sequence level, Liu et al. 2025,
    https://richardli.xyz/rl-collapse, Seq-TIS, and with `low` its Seq-MIS; the mask, arXiv:2510.18855, section on IcePop;
    the product with PPO's clipped loss, decoupled PPO, arXiv:2110.00641; `normalize`, verl-project/verl@20c30bf.
    """
    if level not in WEIGHT_LEVELS:
        raise ValueError(f"rollout_is: got {level!r}, expected one of {', '.join(WEIGHT_LEVELS)}")
    d = _log_ratio(trainer, sampler, mask_BT)
    ratio = _exp(d if level == "token" else d.sum(dim=1, keepdim=True))
    weights = ratio.clamp(max=high) if low is None else ratio.where((ratio >= low) & (ratio <= high), 0.0)
    if normalize:
        counted = mask_BT if level == "token" else mask_BT.any(dim=1, keepdim=True)
        mean = (weights * counted).sum() / counted.sum().clamp(min=1)
        weights = weights / mean.where(mean > 0, 1.0)
    return (weights * mask_BT).float()


def accepted(
    trainer: Tensor, sampler: Tensor, mask_BT: Tensor, criterion: str, low: float | None, high: float
) -> Tensor:
    """Return the response tokens that a criterion keeps in the loss; all but the first keep or reject whole sequences.

    - `token_k1`: low <= r <= high.
    - `seq_sum_k1`: the same for the product of r over the sequence.
    - `seq_mean_k1`: the same for their geometric mean, which does not grow with the sequence's length.
    - `seq_mean_k3`: the mean of r - 1 - d, which estimates KL(sampler || trainer), is at most high.
    - `seq_max_k2`: the largest d^2 / 2 is at most high.

    Args:
        trainer, sampler, mask_BT: as above.
        criterion: one of the names above.
        low: lower bound; None for 1 / high, not read by the last two.
        high: upper bound.

    Returns:
        (B, T) bool, a subset of the mask.

    Raises:
        ValueError: also if the criterion is unknown.

    Source: product and geometric mean, Liu et al. 2025, https://richardli.xyz/rl-collapse, parts 2 and 3 (Seq-MIS, Geo-RS),
    the geometric mean as the sequence's ratio also arXiv:2507.18071, equation 7; the last two, arXiv:2512.23075. The names
    are those of verl-project/verl@20c30bf. Deviation: its bounds of k1 apply to 1 / r, these to r; reciprocal bounds are the
    same for both.
    """
    d = _log_ratio(trainer, sampler, mask_BT)
    lengths_B = mask_BT.sum(dim=1).clamp(min=1)
    if criterion == "token_k1":
        statistic = d
    elif criterion == "seq_sum_k1":
        statistic = d.sum(dim=1, keepdim=True)
    elif criterion == "seq_mean_k1":
        statistic = (d.sum(dim=1) / lengths_B)[:, None]
    elif criterion == "seq_mean_k3":
        statistic = (_k3(d).sum(dim=1) / lengths_B)[:, None]
    elif criterion == "seq_max_k2":
        statistic = 0.5 * d.square().amax(dim=1, keepdim=True)
    else:
        known = ", ".join(RATIO_CRITERIA + DIVERGENCE_CRITERIA)
        raise ValueError(f"rollout_rs: got {criterion!r}, expected one of {known}")
    if criterion in DIVERGENCE_CRITERIA:
        return mask_BT & (statistic <= high)
    lowest = -math.log(high) if low is None else math.log(low)
    return mask_BT & (statistic >= lowest) & (statistic <= math.log(high))


def not_vetoed(trainer: Tensor, sampler: Tensor, mask_BT: Tensor, threshold: float) -> Tensor:
    """Return the response tokens (B, T) of sequences in which no token's r is below `threshold` (> 0, typically 1e-4).

    One such token means that the trainer would hardly ever write this sequence.

    Source: volcengine/verl@0b4e2a8, `rollout_token_veto_threshold`.
    """
    d = _log_ratio(trainer, sampler, mask_BT)
    return mask_BT & (d >= math.log(threshold)).all(dim=1, keepdim=True)
