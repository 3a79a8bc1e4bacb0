import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.advantages import gae, grpo, masked_whiten, token_rewards

F64 = torch.float64


def random_batch(seed, rows, width):
    """A mask with holes and empty rows, and a source of (B, T) fp64 noise that is NaN outside the mask."""
    source = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=source) < 0.6

    def noise():
        return torch.randn(rows, width, generator=source, dtype=F64).masked_fill(~mask, torch.nan)

    return mask, noise


shapes = {"seed": st.integers(0, 9999), "rows": st.integers(1, 5), "width": st.integers(1, 7)}


# ------------------------------------------------------------------------------------------------- token_rewards


def test_token_rewards_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    scores = torch.tensor([1.0, 2.0, 0.0, 5.0])
    assert token_rewards(scores, mask).tolist() == [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    kl = torch.tensor([[0.5, -0.25, 1.0, torch.nan], [1.0, 9.0, 2.0, torch.inf], [1.0, 1.0, 1.0, 1.0], [7.0] * 4])
    assert token_rewards(scores, mask, kl, 0.5).tolist() == [
        [-0.25, 0.125, 0.5, 0],
        [-0.5, 0, 1.0, 0],
        [-0.5, -0.5, -0.5, -0.5],
        [0, 0, 0, 0],
    ]


@given(**shapes)
def test_token_rewards_keep_every_score(seed, rows, width):
    mask, noise = random_batch(seed, rows, width)
    scores = torch.arange(1.0, rows + 1)
    rewards = token_rewards(scores, mask, noise(), 0.0)
    assert torch.equal(rewards.sum(dim=1), torch.where(mask.any(dim=1), scores, 0.0))
    for row, keep in zip(rewards, mask, strict=True):
        assert not row.any() or row.nonzero().item() == keep.nonzero().max().item()


# ----------------------------------------------------------------------------------------------------------- gae


def test_gae_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 9.0]])
    values = torch.tensor([[0.5, 0.25, 0.75, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # delta: 0 + 0.5*0.25 - 0.5 = -0.375; 0 + 0.5*0.75 - 0.25 = 0.125; 1 - 0.75 = 0.25
    # advantage: 0.25; 0.125 + 0.25*0.25 = 0.1875; -0.375 + 0.25*0.1875 = -0.328125
    assert advantages.tolist() == [[-0.328125, 0.1875, 0.25, 0.0]]
    assert returns.tolist() == [[0.171875, 0.4375, 1.0, 0.0]]


def naive_gae(rewards, values, gamma, lam):
    """The definition: sums of discounted TD errors over one row's own tokens."""
    n = len(rewards)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@given(**shapes, gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.7, 1.0]))
def test_gae_like_the_loop(seed, rows, width, gamma, lam):
    mask, noise = random_batch(seed, rows, width)
    rewards, values = noise(), noise()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert not advantages[~mask].any() and not returns[~mask].any()
    for b in range(rows):
        expected = naive_gae(rewards[b][mask[b]].tolist(), values[b][mask[b]].tolist(), gamma, lam)
        assert advantages[b][mask[b]].tolist() == pytest.approx(expected, abs=1e-12)
        got = (returns[b] - advantages[b])[mask[b]]
        assert torch.allclose(got, values[b][mask[b]], rtol=0, atol=1e-12)


@given(**shapes)
def test_gae_with_lambda_one_returns_the_reward_to_go(seed, rows, width):
    mask, noise = random_batch(seed, rows, width)
    rewards, values = noise(), noise()
    _, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    assert torch.allclose(returns[mask], to_go[mask], rtol=0, atol=1e-12)


def test_gae_keeps_dtype():
    ones = torch.ones(1, 2)
    for dtype in (torch.float32, F64):
        assert gae(ones, ones.to(dtype), ones.bool(), 1.0, 1.0)[0].dtype == dtype


# -------------------------------------------------------------------------------------------------- masked_whiten


def test_whiten_by_hand():
    x = torch.tensor([[1.0, 3.0, 50.0], [5.0, 50.0, 50.0]], dtype=F64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    # mean 3, unbiased variance (4 + 0 + 4) / 2 = 4
    unit = 2 / math.sqrt(4 + 1e-8)
    assert masked_whiten(x, mask).tolist() == [
        pytest.approx([-unit, 0, 0], abs=1e-15),
        pytest.approx([unit, 0, 0], abs=1e-15),
    ]


@given(**shapes)
def test_whiten_like_statistics(seed, rows, width):
    mask, noise = random_batch(seed, rows, width)
    x = noise()
    chosen = x[mask].tolist()
    whitened = masked_whiten(x, mask)
    assert not whitened[~mask].any()
    if len(chosen) > 1:
        mean, scale = statistics.mean(chosen), math.sqrt(statistics.variance(chosen) + 1e-8)
        assert whitened[mask].tolist() == pytest.approx([(v - mean) / scale for v in chosen], abs=1e-9)
    else:
        assert not whitened.any()


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_whiten_of_equal_values_is_zero_at_any_size(dtype):
    mask = torch.rand(7, 11, generator=torch.Generator().manual_seed(0)) < 0.7
    for value in (0.1, 1000.1, -1e6):
        whitened = masked_whiten(torch.full((7, 11), value, dtype=dtype), mask)
        assert whitened.dtype == dtype and not whitened.any()


# ---------------------------------------------------------------------------------------------------------- grpo


def test_grpo_by_hand():
    scores = torch.tensor([1.0, 0.0, 4.0, 2.0, 7.0], dtype=F64)
    group_id = torch.tensor([5, 9, 5, 9, 2])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [1, 1]]).bool()
    # group 5: 1, 4: mean 2.5; group 9: 0, 2: mean 1; group 2 alone
    plain = grpo(scores, mask, group_id, norm_by_std=False)
    assert plain.tolist() == [[-1.5, -1.5], [-1, 0], [1.5, 1.5], [0, 0], [0, 0]]
    # unbiased std: group 5: sqrt(2.25 + 2.25) = 2.1213203435596424; group 9: sqrt(2)
    scaled = grpo(scores, mask, group_id, norm_by_std=True)
    a, b = 1.5 / (2.1213203435596424 + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    expected = [[-a, -a], [-b, 0], [a, a], [0, 0], [0, 0]]
    assert torch.allclose(scaled, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-15)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-2.0, 0.0, 0.1, 1.0, 3.5])), min_size=1, max_size=12),
    st.booleans(),
)
def test_grpo_like_statistics(samples, norm_by_std):
    groups = [group for group, _ in samples]
    scores = [score for _, score in samples]
    mask = torch.ones(len(samples), 2, dtype=torch.bool)
    advantages = grpo(torch.tensor(scores, dtype=F64), mask, torch.tensor(groups), norm_by_std)
    for i, (group, score) in enumerate(samples):
        members = [s for g, s in samples if g == group]
        expected = score - statistics.mean(members)
        if norm_by_std and len(members) > 1:
            expected /= statistics.stdev(members) + 1e-6
        assert advantages[i].tolist() == pytest.approx([expected] * 2, abs=1e-9)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -1e8, 1e30])
def test_grpo_of_equal_scores_is_exactly_zero(norm_by_std, dtype, score):
    group_id = torch.tensor([0] * 7 + [1] + [2] * 3)
    advantages = grpo(torch.full((11,), score, dtype=dtype), torch.ones(11, 3, dtype=torch.bool), group_id, norm_by_std)
    assert advantages.dtype == dtype and not advantages.any()


def test_grpo_raises_what_scored_above_its_group():
    scores = torch.tensor([0.0, 1.0, 1.0, 0.0])
    advantages = grpo(scores, torch.ones(4, 1, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), True)[:, 0]
    assert (advantages > 0).tolist() == [False, True, True, False]
    assert advantages.sum().abs() < 1e-6
