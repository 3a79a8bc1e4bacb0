"""Token rewards, advantages and whitening. Shape letters: B samples, T response tokens, G groups (prompts).

Arguments and results mean the same in all functions:

- scores: (B,) float, finite; one score per sample.
- mask: (B, T) bool, True on tokens that the policy wrote. Tokens outside it (padding, or text of an environment between turns)
  are skipped: their entries are not read, they take no time step, and results are 0 there.
- token_rewards: (B, T) float, the reward of each token.
- group_id: (B,) int64; samples with the same number are one group, in any order.
- gamma: discount per token.
- Advantages are (B, T), of the dtype of the scores, rewards or values that they are computed from.

Everything runs on the driver's CPU; statistics are in fp64 for any input.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

GRPO_EPS = 1e-6
WHITEN_EPS = 1e-8


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, coef: float = 0.0) -> Tensor:
    """Return the score on each row's last response token, minus `coef * kl` on every response token.

    Args:
        scores, mask: as above. A row without response tokens has no token for its score and stays 0.
        kl: (B, T) float, a per-token KL estimate, or None for no penalty.
        coef: weight of the penalty.

    Source: arXiv:1909.08593, equation 2.
    """
    last = mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)
    rewards = torch.where(last, scores[:, None], 0.0)
    return rewards if kl is None else rewards - coef * torch.where(mask, kl, 0.0).to(scores.dtype)


def overlong_penalty(lengths: Tensor, longest: int, buffer: int, factor: float) -> Tensor:
    """Return DAPO's soft overlong punishment (B,) fp32, which is added to the score.

    min(0, max(-1, (longest - buffer - length) / buffer)) factor: 0 up to `longest - buffer` tokens, then falling to -factor at
    `longest` and beyond, which only a conversation of several rows reaches.

    Args:
        lengths: (B,) int, tokens of each response.
        longest: longest response allowed [tokens].
        buffer: tokens over which the penalty grows, 1 to `longest`.
        factor: size of the largest penalty; the paper's is 1.

    Source: arXiv:2503.14476, equation 13.
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0) * factor


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale `x` to mean 0 and variance 1 over all masked entries of the batch.

    The variance is unbiased; WHITEN_EPS is added to it under the root. Fewer than two entries, or equal entries, give 0.

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


class _Group(NamedTuple):
    """Scores in fp64 relative to the lowest of their group.

    Equal scores are then exactly 0, and a tiny standard deviation cannot amplify rounding.
    """

    relative_B: Tensor
    of_row_B: Tensor
    size_G: Tensor

    @classmethod
    def of(cls, scores_B: Tensor, group_id_B: Tensor) -> "_Group":
        unique, of_row_B = torch.unique(group_id_B, return_inverse=True)
        scores_B = scores_B.double()
        lowest_G = scores_B.new_full((len(unique),), torch.inf).scatter_reduce(0, of_row_B, scores_B, "amin")
        size_G = torch.bincount(of_row_B, minlength=len(unique)).double()
        return cls(scores_B - lowest_G[of_row_B], of_row_B, size_G)

    def sum_G(self, x_B: Tensor) -> Tensor:
        return torch.zeros_like(self.size_G).index_add_(0, self.of_row_B, x_B)

    def highest_G(self, x_B: Tensor) -> Tensor:
        return torch.full_like(self.size_G, -torch.inf).scatter_reduce(0, self.of_row_B, x_B, "amax")

    def centred_B(self) -> Tensor:
        return self.relative_B - (self.sum_G(self.relative_B) / self.size_G)[self.of_row_B]

    def std_G(self) -> Tensor:
        """Return the unbiased standard deviation; 0 for a group of one."""
        return (self.sum_G(self.centred_B().square()) / (self.size_G - 1).clamp(min=1)).sqrt()


def _on_tokens(advantages_B: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the row's number on all its response tokens, 0 elsewhere."""
    return torch.where(mask, advantages_B[:, None], 0.0).to(dtype)


def grpo(scores: Tensor, mask: Tensor, group_id: Tensor, norm_by_std: bool) -> Tensor:
    """Return group-relative advantages: each sample's score minus its group's mean, on all its response tokens.

    A_i = r_i - mean(r), with `norm_by_std` divided by (the group's unbiased standard deviation + GRPO_EPS), as verl does;
    the paper leaves the estimator open; without it they are Dr. GRPO's. A group of one, or of equal scores, gives 0. Rows
    without response tokens count in their group; the registered estimator makes each a group of its own before, see `_outcome`.

    Source: GRPO, arXiv:2402.03300, section 4.1.2; Dr. GRPO, arXiv:2503.20783, section 3.
    """
    group = _Group.of(scores, group_id)
    advantages = group.centred_B()
    if norm_by_std:
        advantages = advantages / (group.std_G() + GRPO_EPS)[group.of_row_B]
    return _on_tokens(advantages, mask, scores.dtype)


def grpo_passk(scores: Tensor, mask: Tensor, group_id: Tensor, norm_by_std: bool) -> Tensor:
    """Return Pass@k advantages: only the best sample of a group has one, its distance to the second best.

    A_i = max(0, r_i - max of the others' r), with `norm_by_std` divided as in `grpo`, which verl does and the paper does not.
    A group of one, or with several best samples, gives 0.

    Source: arXiv:2503.19595, the leave-one-out advantage of the objective max(r_1, ..., r_k); the name and the division are
    those of verl-project/verl@018f23b.
    """
    group = _Group.of(scores, group_id)
    highest_B = group.highest_G(group.relative_B)[group.of_row_B]
    best_B = group.relative_B == highest_B
    second_B = group.highest_G(group.relative_B.masked_fill(best_B, -torch.inf))[group.of_row_B]
    alone_B = best_B & (group.sum_G(best_B.double()) == 1)[group.of_row_B] & second_B.isfinite()
    advantages = torch.where(alone_B, highest_B - second_B, 0.0)
    if norm_by_std:
        advantages = advantages / (group.std_G() + GRPO_EPS)[group.of_row_B]
    return _on_tokens(advantages, mask, scores.dtype)


def rloo(scores: Tensor, mask: Tensor, group_id: Tensor) -> Tensor:
    """Return REINFORCE leave-one-out advantages: each sample's score minus the mean of the others in its group.

    A_i = r_i - sum of r_j over j != i / (n - 1) = n / (n - 1) (r_i - mean(r)). A group of one gives 0. verl keeps the score
    itself there, which is no leave-one-out estimate.

    Source: arXiv:2402.14740; verl-project/verl@018f23b, `rloo`.
    """
    group = _Group.of(scores, group_id)
    scale_G = group.size_G / (group.size_G - 1).clamp(min=1)
    return _on_tokens(group.centred_B() * scale_G[group.of_row_B], mask, scores.dtype)


def opo(scores: Tensor, mask: Tensor, group_id: Tensor) -> Tensor:
    """Return advantages over the optimal reward baseline: each score minus its group's mean weighted by length.

    A_i = r_i - sum(l_j r_j) / sum(l_j) over the group, with l the response's tokens. This baseline has the least variance if
    the squared norm of a response's gradient grows with its length. A group of one gives 0.

    Source: arXiv:2505.23585; verl-project/verl@018f23b, `opo`.
    """
    group = _Group.of(scores, group_id)
    length_B = mask.sum(dim=1).double()
    baseline_G = group.sum_G(length_B * group.relative_B) / group.sum_G(length_B).clamp(min=1)
    return _on_tokens(group.relative_B - baseline_G[group.of_row_B], mask, scores.dtype)


def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, gamma: float, over_turns: bool = False) -> Tensor:
    """Return REINFORCE++ advantages: discounted rewards to go, whitened over all response tokens of the batch.

    G_t = sum of gamma^(k - t) r_k over the row's response tokens k >= t. With the KL in the reward and gamma = 1 it is the
    score minus the KL penalties from t on. Tokens outside the mask take no time step, whereas verl restarts after them. With
    `over_turns` t and k count turns instead of tokens, see `gae_over_turns`.

    Source: arXiv:2501.03262; verl-project/verl@018f23b, `reinforce_plus_plus`.
    """
    return masked_whiten(_to_go(token_rewards, mask, gamma, over_turns), mask)


def reinforce_plus_plus_baseline(scores: Tensor, mask: Tensor, group_id: Tensor) -> Tensor:
    """Return REINFORCE++ advantages with a baseline: scores less their group's mean, whitened over the batch's tokens.

    Source: arXiv:2501.03262; verl-project/verl@018f23b, `reinforce_plus_plus_baseline`.
    """
    centred = _on_tokens(_Group.of(scores, group_id).centred_B(), mask, torch.float64)
    return masked_whiten(centred, mask).to(scores.dtype)


def remax(token_rewards: Tensor, greedy_scores: Tensor, mask: Tensor) -> Tensor:
    """Return ReMax advantages: rewards to go minus the score of the greedy response to the same prompt.

    A_t = sum of r_k over the row's response tokens k >= t - b. The baseline b, in `greedy_scores` (B,), excludes the KL, as in
    verl.

    Source: arXiv:2310.10505, algorithm 1; verl-project/verl@018f23b, `remax`.
    """
    return torch.where(mask, _to_go(token_rewards, mask, 1.0) - greedy_scores[:, None], 0.0)


def _to_go(token_rewards: Tensor, mask: Tensor, gamma: float, over_turns: bool = False) -> Tensor:
    """Return discounted rewards to go, which are the advantages over values of 0."""
    estimate = gae_over_turns if over_turns else gae
    return estimate(token_rewards, torch.zeros_like(token_rewards), mask, gamma, 1.0)[0]


# The registry -----------------------------------------------------------------------------------------------------


class Columns(Protocol):
    """A batch: token_rewards (B, T), response_mask (B, T), group_id (B,), and values (B, T) or greedy_scores (B,) for the
    estimators that need them; outcomes (B,) if the sums of token_rewards are known."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Tensor: ...


class Options(Protocol):
    """The keys of the configuration's `algorithm` that estimators read."""

    @property
    def gamma(self) -> float: ...

    @property
    def lam(self) -> float: ...

    @property
    def time_step(self) -> str: ...

    @property
    def norm_adv_by_std_in_grpo(self) -> bool: ...


def _outcome(batch: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Return each sample's reward (the score, and the KL if it is in the reward), mask and group.

    The reward is the column outcomes, without it the sum over the tokens: equal scores stay equal if the first is there, while
    sums of turns' rewards are rounded.

    A row without a token of the policy, whose environment failed before the first turn, says nothing about the policy: it is
    a group of its own.
    """
    rewards, mask = batch["token_rewards"], batch["response_mask"]
    outcomes = batch["outcomes"] if "outcomes" in batch else rewards.sum(dim=1, dtype=torch.float64)
    alone = batch["group_id"].max() + 1 + torch.arange(len(mask)) if len(mask) else batch["group_id"]
    groups = torch.where(mask.any(dim=1), batch["group_id"], alone)
    return outcomes.to(rewards.dtype), mask, groups


def _ppo(batch: Columns, options: Options) -> tuple[Tensor, Tensor]:
    mask = batch["response_mask"]
    estimate = gae_over_turns if options.time_step == "turn" else gae
    advantages, returns = estimate(batch["token_rewards"], batch["values"], mask, options.gamma, options.lam)
    return masked_whiten(advantages, mask), returns


class Estimator(NamedTuple):
    """A function of `algorithm.adv_estimator` and the columns that it reads beside rewards, mask and groups."""

    function: Callable[[Columns, Options], Tensor | tuple[Tensor, Tensor]]
    reads: tuple[str, ...] = ()

    def __call__(self, batch: Columns, options: Options) -> dict[str, Tensor]:
        """Return advantages (B, T), and with a critic returns (B, T)."""
        found = self.function(batch, options)
        return {"advantages": found} if isinstance(found, Tensor) else {"advantages": found[0], "returns": found[1]}


ESTIMATORS = {
    "gae": Estimator(_ppo, ("values",)),
    "grpo": Estimator(lambda batch, o: grpo(*_outcome(batch), o.norm_adv_by_std_in_grpo)),
    "grpo_passk": Estimator(lambda batch, o: grpo_passk(*_outcome(batch), o.norm_adv_by_std_in_grpo)),
    "rloo": Estimator(lambda batch, o: rloo(*_outcome(batch))),
    "opo": Estimator(lambda batch, o: opo(*_outcome(batch))),
    "reinforce_plus_plus": Estimator(
        lambda b, o: reinforce_plus_plus(b["token_rewards"], b["response_mask"], o.gamma, o.time_step == "turn")
    ),
    "reinforce_plus_plus_baseline": Estimator(lambda batch, o: reinforce_plus_plus_baseline(*_outcome(batch))),
    "remax": Estimator(
        lambda b, o: remax(b["token_rewards"], b["greedy_scores"], b["response_mask"]), ("greedy_scores",)
    ),
}

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

    Source: the turn-level MDP of Turn-PPO, arXiv:2512.17008; equation 16 of arXiv:1506.02438 over its steps. The paper trains the
    critic on turns; here it has a target at every token, because its loss is over tokens.
    """
    index = turn_index(mask)
    rewards_BK = sums_by_turn(token_rewards, index)
    values_BK = sums_by_turn(torch.where(turn_starts(mask), values, 0.0), index)
    turns_BK = sums_by_turn(mask.to(values.dtype), index) > 0
    advantages_BK, returns_BK = gae(rewards_BK, values_BK, turns_BK, gamma, lam)
    return on_tokens(advantages_BK, index), on_tokens(returns_BK, index)


def turn_index(mask_BT: Tensor) -> Tensor:
    """Return the index of each token's turn, from 0 in each row, and -1 outside the mask: (B, T) int64."""
    index_BT = turn_starts(mask_BT).cumsum(dim=1) - 1
    return torch.where(mask_BT, index_BT, -1)


def turn_starts(mask_BT: Tensor) -> Tensor:
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
