"""Generalised advantage estimates over tokens and over turns. Letters and arguments as in `advantages.py`; K turns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlx.algorithms.turns import on_tokens, sums_by_turn, turn_index, turn_starts

BLOCK_STEPS = 128
"""Time steps that `gae` computes together: a block of a thousand rows in fp64 fits in a processor's cache."""


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates over each row's response tokens, and returns (B, T) = advantages + values.

    The last response token is terminal: nothing is bootstrapped beyond it. The next response token is the successor, over any
    gap. Nothing is whitened.

    Args:
        token_rewards, mask, gamma: as in `advantages.py`.
        values: (B, T) float, value of the state in which each token is chosen.
        lam: GAE's lambda.

    Source: arXiv:1506.02438, equation 16.
    """
    advantages, returns = values.new_empty(mask.shape), values.new_empty(mask.shape)
    next_value_B = next_advantage_B = values.new_zeros(mask.shape[0], dtype=torch.float64)
    decay = next_value_B.new_tensor(gamma * lam)
    has_gaps = bool((mask[:, 1:] & ~mask[:, :-1]).any())  # without gaps the tokens outside come last and stay 0
    for start in reversed(range(0, mask.shape[1], BLOCK_STEPS)):
        block = slice(start, start + BLOCK_STEPS)
        mask_TB, rewards_TB, values_TB = (_transposed(x[:, block]) for x in (mask, token_rewards, values))
        values_TB = _followed_by(next_value_B, torch.where(mask_TB, values_TB, 0.0))
        if has_gaps:
            _fill_gaps(values_TB, mask_TB)
        delta_TB = rewards_TB + gamma * values_TB[1:] - values_TB[:-1]
        sums_TB = _followed_by(next_advantage_B, torch.where(mask_TB, delta_TB, 0.0))
        # Outside the mask nothing is added and nothing decays, so sums of later tokens pass unchanged.
        _add_later(sums_TB, torch.where(mask_TB, decay, 1.0).unbind() if has_gaps else [decay] * len(delta_TB))
        next_value_B, next_advantage_B = values_TB[0], sums_TB[0]
        for result, found_TB in ((advantages, sums_TB[:-1]), (returns, sums_TB[:-1] + values_TB[:-1])):
            inside_TB = torch.where(mask_TB, found_TB, 0.0) if has_gaps else found_TB
            result[:, block] = _transposed(inside_TB.to(result.dtype))
    return advantages, returns


def _transposed(x: Tensor) -> Tensor:
    """Transpose in memory, so that a time step is contiguous; copying the part out first is faster."""
    return x.contiguous().T.contiguous()


def _followed_by(last_B: Tensor, x_TB: Tensor) -> Tensor:
    """Append `last_B` to `x_TB`: (T + 1, B) of the dtype of `last_B`."""
    longer_TB = last_B.new_empty(len(x_TB) + 1, len(last_B))
    longer_TB[:-1], longer_TB[-1] = x_TB, last_B
    return longer_TB


def _fill_gaps(values_TB: Tensor, mask_TB: Tensor) -> None:
    """Replace entries outside the mask (T, B) by the next entry in time; values (T + 1, B) have one more at the end."""
    values, masks = values_TB.unbind(), mask_TB.unbind()
    for t in reversed(range(len(masks))):
        torch.where(masks[t], values[t], values[t + 1], out=values[t])


def _add_later(x_TB: Tensor, decays: Sequence[Tensor]) -> None:
    """Add to each row, from the end on, its decay, (B,) or one number, times the next row; x (T + 1, B) has one more row."""
    x, later_B = x_TB.unbind(), torch.empty_like(x_TB[0])
    for t in reversed(range(len(decays))):
        torch.mul(x[t + 1], decays[t], out=later_B)
        x[t].add_(later_B)


def gae_over_turns(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates over turns, which are runs of tokens in the mask, and returns; both (B, T).

    A turn is one step: its reward is the sum over its tokens, and its value that of its first token, the state in which the turn
    is chosen. All its tokens have its advantage. They also share its return as target of the critic, since nothing is discounted
    within a turn.

    Args:
        token_rewards, values, mask, gamma, lam: as in `gae`.

    Source: the turn-level MDP of Turn-PPO, arXiv:2512.17008; equation 16 of arXiv:1506.02438 over its steps. The paper trains the
    critic on turns; here it has a target at every token, because its loss is over tokens.
    """
    index = turn_index(mask)
    rewards_BK = sums_by_turn(token_rewards, index)
    values_BK = sums_by_turn(torch.where(turn_starts(mask), values, 0.0), index)
    turns_BK = sums_by_turn(mask.to(values.dtype), index) > 0
    advantages_BK, returns_BK = gae(rewards_BK, values_BK, turns_BK, gamma, lam)
    return on_tokens(advantages_BK, index), on_tokens(returns_BK, index)
