"""Per-token losses of the policy and of the value model. Shape letters: B samples, T response tokens.

Each returns a loss per token and statistics per token; who calls aggregates both over the response mask
(`aggregation.py`). Inputs are fp32 or fp64, results of the same dtype. Entries outside the mask must be finite.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_c: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with separate bounds and dual clip.

    With ratio r = exp(log_probs - old_log_probs): loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where
    A < 0 at most -A clip_c. The log-ratio is clamped to +-LOG_RATIO_LIMIT before exp, so that r stays finite (5e8);
    beyond the clamp a token has no gradient, as it would under the clip or, for r < 2e-9 and A > 0, a negligible one.

    Args:
        log_probs: (B, T) of the policy being trained; the only input with a gradient.
        old_log_probs: (B, T) of the policy that sampled.
        advantages: (B, T).
        clip_low: how far below 1 the ratio may fall before the clip holds.
        clip_high: how far above 1 it may rise.
        clip_c: dual clip, > 1; math.inf switches it off.

    Returns:
        loss (B, T), and stats (B, T) without gradient: `clipped` 1 where the clip holds, `clipped_lower` 1 where the dual
        clip holds, `approx_kl` = old_log_probs - log_probs (k1), `ratio`.

    Raises:
        ValueError: clip_c is not above 1.

    Source: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729; separate bounds, arXiv:2503.14476.
    """
    if not clip_c > 1:
        raise ValueError(f"clip_ratio_c: got {clip_c}, expected a number above 1 (verl's default is 3.0)")
    old_log_probs, advantages = old_log_probs.detach(), advantages.detach()
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.maximum(plain, bounded)
    ceiling = torch.where(advantages < 0, -advantages * clip_c, torch.inf)
    stats = {
        "clipped": bounded > plain,
        "clipped_lower": surrogate > ceiling,
        "approx_kl": -log_ratio,
        "ratio": ratio,
    }
    return torch.minimum(surrogate, ceiling), {name: x.detach().to(log_probs.dtype) for name, x in stats.items()}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the value, the larger of plain and clipped around the old value.

    loss = 0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2).

    Args:
        values: (B, T) of the model being trained; the only input with a gradient.
        old_values: (B, T) when the batch was made.
        returns: (B, T) regression targets.
        clip: how far a value may move from its old one, > 0; math.inf switches the clip off.

    Returns:
        loss (B, T), and stats (B, T) without gradient: `clipped` 1 where the clip holds.

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
    return 0.5 * torch.maximum(plain, bounded), {"clipped": clipped}
