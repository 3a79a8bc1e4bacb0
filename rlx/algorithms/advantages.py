"""Token rewards, advantages and whitening. Shape letters: B samples, T response tokens.

A mask is True on tokens the policy wrote. Tokens outside it (padding, or text of an environment between turns) get 0 and
are stepped over. All run on the driver's CPU; statistics are taken in fp64 whatever the input.
"""

import torch
from torch import Tensor

GRPO_EPS = 1e-6
WHITEN_EPS = 1e-8


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, coef: float = 0.0) -> Tensor:
    """The score on each row's last response token, minus `coef * kl` on every response token.

    Args:
        scores: (B,) float, one score per sample.
        mask: (B, T) bool.
        kl: (B, T) float, a per-token KL estimate, or None for no penalty; ignored outside the mask.
        coef: weight of the penalty.

    Returns:
        (B, T) rewards of the dtype of `scores`, 0 outside the mask. A row without response tokens has no place for its
        score and stays 0.

    Source: arXiv:1909.08593, equation 2.
    """
    last = mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)
    rewards = torch.where(last, scores[:, None], 0.0)
    return rewards if kl is None else rewards - coef * torch.where(mask, kl, 0.0).to(scores.dtype)


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over each row's response tokens.

    The last response token is terminal: nothing is bootstrapped beyond it. Tokens outside the mask take no time step:
    the next response token is the successor. No whitening.

    Args:
        token_rewards: (B, T) float, reward of each token; read inside the mask only.
        values: (B, T) float, value of the state in which each token is chosen; read inside the mask only.
        mask: (B, T) bool.
        gamma: discount per token.
        lam: GAE's lambda.

    Returns:
        advantages (B, T) and returns (B, T) = advantages + values, both 0 outside the mask, of the dtype of `values`.

    Source: arXiv:1506.02438, equation 16.
    """
    rewards = torch.where(mask, token_rewards, 0.0).double()
    known_values = torch.where(mask, values, 0.0).double()
    advantages = torch.zeros_like(known_values)
    next_value = known_values.new_zeros(mask.shape[0])
    next_advantage = next_value
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - known_values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], known_values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages.to(values.dtype), (advantages + known_values).to(values.dtype)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shifts and scales `x` to mean 0 and variance 1 over all masked entries of the batch.

    The variance is unbiased; WHITEN_EPS is added to it under the root. Fewer than two entries, or entries that are all
    equal, give 0.

    Args:
        x: (B, T) float.
        mask: (B, T) bool.

    Returns:
        (B, T) of the dtype of `x`, 0 outside the mask.

    Source: advantage normalisation of PPO's public implementations, here over the whole batch.
    """
    chosen = x[mask].double()
    if chosen.numel() == 0:
        return torch.zeros_like(x)
    chosen = chosen - chosen[0]  # equal entries become exactly 0
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / max(chosen.numel() - 1, 1)
    whitened = torch.zeros_like(x)
    whitened[mask] = (centred * torch.rsqrt(variance + WHITEN_EPS)).to(x.dtype)
    return whitened


def grpo(scores: Tensor, mask: Tensor, group_id: Tensor, norm_by_std: bool) -> Tensor:
    """Group-relative advantages: each sample's score minus its group's mean, the same on all its response tokens.

    With `norm_by_std` the difference is divided by (the group's unbiased standard deviation + GRPO_EPS), as verl does;
    the paper leaves the estimator open. A group of one, or of equal scores, gives 0. Rows without response tokens count
    in their group.

    Args:
        scores: (B,) float, finite.
        mask: (B, T) bool.
        group_id: (B,) int64; samples with the same number are one group, in any order.
        norm_by_std: True: GRPO; False: Dr. GRPO.

    Returns:
        (B, T) advantages of the dtype of `scores`, 0 outside the mask.

    Source: GRPO, arXiv:2402.03300, section 4.1.2; Dr. GRPO, arXiv:2503.20783.
    """
    unique, group = torch.unique(group_id, return_inverse=True)
    size = torch.zeros(len(unique), dtype=torch.float64, device=scores.device)
    size.index_add_(0, group, torch.ones_like(scores, dtype=torch.float64))
    # Relative to the group's lowest score, equal scores are exactly 0 and no rounding can be blown up by a tiny std.
    lowest = torch.full_like(size, torch.inf).scatter_reduce(0, group, scores.double(), "amin")
    relative = scores.double() - lowest[group]
    mean = torch.zeros_like(size).index_add_(0, group, relative) / size
    centred = relative - mean[group]
    if norm_by_std:
        variance = torch.zeros_like(size).index_add_(0, group, centred.square()) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + GRPO_EPS)
    return torch.where(mask, centred[:, None], 0.0).to(scores.dtype)
