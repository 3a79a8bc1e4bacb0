"""Per-token losses of the policy and of the value model. Shape letters: B samples, T response tokens.

Each returns a loss per token and statistics per token; the caller aggregates both over the response mask (`aggregation.py`).
Inputs are fp32 or fp64, results have the same dtype. Entries outside the mask must be finite. A row is a whole sequence: its
losses do not depend on other rows or on padding.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


class LossSettings(NamedTuple):
    """The settings of the policy losses, from the configuration's `actor`."""

    clip_low: float  # how far below 1 a ratio may fall before it is clipped; clip_ratio_low, or clip_ratio
    clip_high: float  # how far above 1 it may rise; clip_ratio_high, or clip_ratio
    clip_c: float = 3.0  # bound of the dual clip, > 1; clip_ratio_c, math.inf switches it off
    tau_pos: float = 1.0  # SAPO's temperature for positive advantages, > 0
    tau_neg: float = 1.05  # for the others


class PolicyLoss(Protocol):
    """The signature of a policy loss, rlx's own or a user's."""

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings, /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token.

        Args:
            log_probs: (B, T) of the policy being trained; the only input with a gradient.
            old_log_probs: (B, T) of the policy before this step's updates.
            advantages: (B, T).
            mask: (B, T) bool, True on the response tokens that count; the other columns hold finite numbers.
            settings: bounds of clips.

        Returns:
            loss (B, T), to be minimised, and statistics (B, T) by name, whose means over the mask are logged as
            `actor/<name>`.
        """
        ...


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return the log-ratio, clamped to +-LOG_RATIO_LIMIT so that the ratio stays finite (5e8). A clamped one has no gradient."""
    return (log_probs - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _mean_of_row(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each row's masked tokens (B, 1); 0 if there are none."""
    return torch.where(mask, x, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return max(-A r, -A clip(r)), and 1 where the clip is active."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.maximum(plain, bounded), (bounded > plain).to(ratio.dtype)


def vanilla(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped surrogate with separate bounds and dual clip.

    With ratio r = exp(log_probs - old_log_probs): loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and for A < 0 at
    most -A clip_c. A clamped log-ratio has no gradient. It would have none under the clip either, or a negligible one for
    r < 2e-9 and A > 0.

    `clip_fraction` is 1 where the clip is active, `clip_fraction_lower` where the dual clip is.

    Raises:
        ValueError: clip_c is not above 1.

    Source: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729; separate bounds, DAPO,
    arXiv:2503.14476, equation 10.
    """
    if not settings.clip_c > 1:
        raise ValueError(f"clip_ratio_c: got {settings.clip_c}, expected a number above 1 (verl's default is 3.0)")
    advantages = advantages.detach()
    ratio = _log_ratio(log_probs, old_log_probs).exp()
    surrogate, clipped = _clipped_surrogate(ratio, advantages, settings)
    ceiling = torch.where(advantages < 0, -advantages * settings.clip_c, torch.inf)
    lower = (surrogate > ceiling).to(ratio.dtype)
    return torch.minimum(surrogate, ceiling), {"clip_fraction": clipped, "clip_fraction_lower": lower}


def gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return GSPO's loss: PPO's clip on the ratio of the whole sequence, normalised by its length.

    With s = exp(mean over the row's mask of log_probs - old_log_probs) and s_t = sg(s) p_t / sg(p_t), where sg stops the
    gradient: loss = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)). This is the paper's GSPO-token, which has an
    advantage per token. If a row's advantages are equal and its tokens have equal weights, its gradient is GSPO's. The paper
    averages over sequences: loss_agg_mode seq-mean-token-mean, which verl sets by itself and rlx leaves to the key. There is
    no dual clip.

    Source: arXiv:2507.18071, equations 5 and 7, in the form of 13 and 14.
    """
    log_s = _mean_of_row(log_probs.detach() - old_log_probs.detach(), mask)
    # 0, with the gradient of a row that is not cut off.
    token = torch.where(log_s.abs() <= LOG_RATIO_LIMIT, log_probs - log_probs.detach(), 0.0)
    ratio = (log_s.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + token).exp()
    loss, clipped = _clipped_surrogate(ratio, advantages.detach(), settings)
    return loss, {"clip_fraction": clipped}


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return CISPO's loss: REINFORCE weighted by the clipped ratio, so that no token loses its gradient.

    loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs, where sg stops the gradient. The paper has no lower bound,
    which clip_ratio_low=1 gives.

    `clip_fraction` is 1 where the ratio is outside its bounds.

    Source: arXiv:2506.13585, equations 4 and 5.
    """
    ratio = _log_ratio(log_probs, old_log_probs).detach().exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -bounded * advantages.detach() * log_probs, {"clip_fraction": (bounded != ratio).to(ratio.dtype)}


def sapo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return SAPO's loss, with a smooth gate in place of the clip.

    loss = -A 4 / tau sigmoid(tau (r - 1)), with tau_pos for A > 0 and tau_neg otherwise. At r = 1 its gradient is the
    policy gradient. The paper averages over each sequence, then over sequences: loss_agg_mode seq-mean-token-mean.

    Raises:
        ValueError: a temperature is not positive.

    Source: arXiv:2511.20347; verl-project/verl@018f23b, `sapo`.
    """
    if not (settings.tau_pos > 0 and settings.tau_neg > 0):
        raise ValueError(f"tau_pos, tau_neg: got {settings.tau_pos}, {settings.tau_neg}, expected positive numbers")
    advantages = advantages.detach()
    tau = torch.full_like(log_probs, settings.tau_neg).masked_fill(advantages > 0, settings.tau_pos)
    ratio = _log_ratio(log_probs, old_log_probs).exp()
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), {}


def geo_mean(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return GMPO's loss: the geometric mean of the row's clipped ratios, times the advantage.

    With d = log_probs - old_log_probs clipped to [-clip_low, clip_high] on the side that PPO clips (above for A > 0, below
    for A < 0): loss = -A exp(mean of d over the row's mask), the same for all tokens of a row whose advantages are equal.
    The bounds apply to the log-ratio; the paper's are 0.4. Its mean over sequences is loss_agg_mode seq-mean-token-mean.

    Source: arXiv:2507.20673; verl-project/verl@018f23b, `geo_mean`, which has no aggregation to choose.
    """
    advantages = advantages.detach()
    log_ratio = _log_ratio(log_probs, old_log_probs)
    above, below = log_ratio.clamp(max=settings.clip_high), log_ratio.clamp(min=-settings.clip_low)
    bounded = torch.where(advantages > 0, above, below)
    loss = -advantages * _mean_of_row(bounded, mask).exp()
    return loss, {"clip_fraction": (bounded != log_ratio).to(log_probs.dtype)}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
}
"""The policy losses by the name in `actor.policy_loss.loss_mode`."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of the value: the larger of the plain one and the one clipped around the old value.

    loss = 0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2).

    Args:
        values: (B, T) of the model being trained; the only input with a gradient.
        old_values: (B, T) when the batch was made.
        returns: (B, T) regression targets.
        clip: how far a value may move from its old one, > 0; math.inf switches the clip off.

    Returns:
        loss (B, T), and statistics (B, T) without gradient: `clip_fraction` is 1 where the clip is active.

    Raises:
        ValueError: clip is not positive.

    Source: OpenAI baselines' PPO2; the factor 0.5 as in verl.
    """
    if not clip > 0:
        raise ValueError(f"cliprange_value: got {clip}, expected a positive number")
    old_values, returns = old_values.detach(), returns.detach()
    near = torch.clamp(values, old_values - clip, old_values + clip)
    plain, bounded = (values - returns).square(), (near - returns).square()
    clipped = (bounded > plain).to(values.dtype)
    return 0.5 * torch.maximum(plain, bounded), {"clip_fraction": clipped}


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
