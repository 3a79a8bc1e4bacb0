import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.advantages import (
    BLOCK_STEPS,
    gae,
    grpo,
    grpo_passk,
    masked_whiten,
    opo,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    token_rewards,
)

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


def stepwise_gae(rewards, values, mask, gamma, lam):
    """The recursion, one step at a time in fp64, in the order of operations that `gae` must keep."""
    advantages, known = torch.zeros(mask.shape, dtype=F64), torch.where(mask, values, 0.0).double()
    next_value = next_advantage = torch.zeros(mask.shape[0], dtype=F64)
    for t in reversed(range(mask.shape[1])):
        delta = torch.where(mask[:, t], rewards[:, t], 0.0).double() + gamma * next_value - known[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], known[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages.to(values.dtype), (advantages + known).to(values.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("width", [0, 1, BLOCK_STEPS - 1, BLOCK_STEPS, 2 * BLOCK_STEPS + 5])
@pytest.mark.parametrize("holes", [False, True])
def test_gae_over_several_blocks_is_that_of_single_steps_bit_for_bit(dtype, width, holes):
    source = torch.Generator().manual_seed(width)
    rewards, values = (torch.randn(9, width, generator=source, dtype=F64).to(dtype) for _ in range(2))
    lengths = torch.randint(0, width + 1, (9, 1), generator=source)
    mask = torch.rand(9, width, generator=source) < 0.5 if holes else torch.arange(width) < lengths
    if holes and width > BLOCK_STEPS:
        mask[:, 3 : 3 + BLOCK_STEPS] = False  # longer than a block
    rewards[~mask], values[~mask] = torch.nan, torch.inf
    for gamma, lam in ((0.99, 0.95), (1.0, 1.0), (0.9, 0.0)):
        found, expected = (f(rewards, values, mask, gamma, lam) for f in (gae, stepwise_gae))
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, expected, strict=True))
        assert found[0].dtype == found[1].dtype == dtype


# -------------------------------------------------------------------------------------------------- masked_whiten


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


# ----------------------------------------------------------------- the other estimators, by plain loops over floats

samples = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([-2.0, 0.0, 0.1, 1.0, 3.5]), st.integers(0, 4)),
    min_size=1,
    max_size=12,
)
"""Group, score and response tokens of each sample."""


def others(drawn, i):
    return [(score, length) for j, (group, score, length) in enumerate(drawn) if group == drawn[i][0] and j != i]


def naive_rloo(drawn, i):
    rest = [score for score, _ in others(drawn, i)]
    return drawn[i][1] - sum(rest) / len(rest) if rest else 0.0


def naive_opo(drawn, i):
    group = [(score, length) for g, score, length in drawn if g == drawn[i][0]]
    tokens = sum(length for _, length in group)
    return drawn[i][1] - sum(score * length for score, length in group) / tokens if tokens else 0.0


def naive_passk(drawn, i):
    rest = [score for score, _ in others(drawn, i)]
    return max(0.0, drawn[i][1] - max(rest)) if rest else 0.0


def naive_passk_by_std(drawn, i):
    group = [score for g, score, _ in drawn if g == drawn[i][0]]
    return naive_passk(drawn, i) / (statistics.stdev(group) + 1e-6) if len(group) > 1 else 0.0


BY_GROUP = {
    "rloo": (rloo, naive_rloo),
    "opo": (opo, naive_opo),
    "grpo_passk": (partial(grpo_passk, norm_by_std=False), naive_passk),
    "grpo_passk by std": (partial(grpo_passk, norm_by_std=True), naive_passk_by_std),
}


def tensors(drawn):
    mask = torch.arange(4) < torch.tensor([[length] for _, _, length in drawn])
    return (
        torch.tensor([score for _, score, _ in drawn], dtype=F64),
        mask,
        torch.tensor([group for group, _, _ in drawn]),
    )


@pytest.mark.parametrize("name", BY_GROUP)
@given(drawn=samples)
def test_estimators_that_compare_samples_like_the_loop(name, drawn):
    estimate, naive = BY_GROUP[name]
    advantages = estimate(*tensors(drawn))
    for i, (_, _, length) in enumerate(drawn):
        expected = [naive(drawn, i)] * length + [0.0] * (4 - length)
        assert advantages[i].tolist() == pytest.approx(expected, abs=1e-12)


def naive_whitened(rows):
    """All numbers of all rows, less their mean, over the root of their unbiased variance."""
    every = [x for row in rows for x in row]
    if len(every) < 2:
        return [[0.0] * len(row) for row in rows]
    mean, scale = statistics.mean(every), math.sqrt(statistics.variance(every) + 1e-8)
    return [[(x - mean) / scale for x in row] for row in rows]


@given(**shapes, gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_reinforce_plus_plus_like_the_loop(seed, rows, width, gamma):
    mask, noise = random_batch(seed, rows, width)
    rewards = noise()
    advantages = reinforce_plus_plus(rewards, mask, gamma)
    assert not advantages[~mask].any()
    own = [rewards[b][mask[b]].tolist() for b in range(rows)]
    to_go = [[sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in own]
    for b, expected in enumerate(naive_whitened(to_go)):
        assert advantages[b][mask[b]].tolist() == pytest.approx(expected, abs=1e-9)


@given(drawn=samples)
def test_reinforce_plus_plus_with_a_baseline_like_the_loop(drawn):
    advantages = reinforce_plus_plus_baseline(*tensors(drawn))
    centred = [
        [score - statistics.mean(s for g, s, _ in drawn if g == group)] * length for group, score, length in drawn
    ]
    for row, expected, (_, _, length) in zip(advantages, naive_whitened(centred), drawn, strict=True):
        assert row[:length].tolist() == pytest.approx(expected, abs=1e-9) and not row[length:].any()


def test_remax_by_hand():
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]]).bool()
    rewards = torch.tensor([[-0.5, 9.0, 2.0], [0.0, 1.0, 9.0], [9.0, 9.0, 9.0]])
    advantages = remax(rewards, torch.tensor([1.0, 0.25, 5.0]), mask)
    assert advantages.tolist() == [[0.5, 0, 1.0], [0.75, 0.75, 0], [0, 0, 0]]


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 30), st.sampled_from([0.0, 1.0, 0.5]))
def test_penalty_for_length_like_the_paper(lengths, buffer, factor):
    def punishment(length):
        if length <= 30 - buffer:
            return 0.0
        return ((30 - buffer) - length) / buffer

    found = overlong_penalty(torch.tensor(lengths), 30, buffer, factor).tolist()
    assert found == pytest.approx([factor * punishment(length) for length in lengths], abs=1e-6)
