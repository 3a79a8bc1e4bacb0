import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.losses import (
    AGGREGATION_MODES,
    POLICY_LOSSES,
    LossSettings,
    denominator,
    token_weights,
    value_loss,
    vanilla,
)
from rlx.config.schema import LOSS_MODES

F64 = torch.float64
LOW, HIGH, C = 0.2, 0.3, 3.0
SETTINGS = LossSettings(LOW, HIGH, C)


def policy(ratios, advantages, **kwargs):
    """Loss, stats and d loss / d log-prob of tokens with these ratios."""
    log_probs = torch.tensor([ratios], dtype=F64).log().requires_grad_()
    advantages = torch.tensor([advantages], dtype=F64)
    settings = LossSettings(**{"clip_low": LOW, "clip_high": HIGH, "clip_c": C, **kwargs})
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    loss, stats = vanilla(log_probs, torch.zeros_like(log_probs), advantages, mask, settings)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss[0].tolist(), {k: v[0].tolist() for k, v in stats.items()}, gradient[0].tolist()


def test_policy_loss_by_hand():
    ratios = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5, 4.0, 1.0]
    advantages = [2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 0.0]
    loss, stats, gradient = policy(ratios, advantages)
    assert loss == pytest.approx([-2, -2.2, -2.6, -1, 3, 1.6, 6, 0], abs=1e-12)
    assert gradient == pytest.approx([-2, -2.2, 0, -1, 3, 0, 0, 0], abs=1e-12)
    assert stats["clip_fraction"] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert stats["clip_fraction_lower"] == [0, 0, 0, 0, 0, 0, 1, 0]


def naive_policy(ratio, advantage, low, high, c):
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * c) if advantage < 0 else loss


@given(
    ratio=st.floats(1e-3, 50),
    advantage=st.floats(-5, 5, allow_subnormal=False),
    low=st.floats(0, 1),
    high=st.floats(0, 2),
    c=st.floats(1.01, 10),
)
def test_policy_loss_like_the_formula(ratio, advantage, low, high, c):
    loss, _, gradient = policy([ratio], [advantage], clip_low=low, clip_high=high, clip_c=c)
    assert loss[0] == pytest.approx(naive_policy(ratio, advantage, low, high, c), abs=1e-9)
    # Wherever there is a gradient, descent raises the log-prob of good tokens and lowers that of bad ones.
    assert gradient[0] == 0 or (gradient[0] < 0) == (advantage > 0)


def test_dual_clip_can_be_switched_off():
    loss, stats, gradient = policy([100.0, 1.0], [-1.0, 1.0], clip_c=math.inf)
    assert loss == pytest.approx([100, -1]) and gradient == pytest.approx([100, -1])
    assert stats["clip_fraction_lower"] == [0, 0]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("distance", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_policy_losses_stay_finite_far_from_the_sampler(name, dtype, distance, advantage):
    log_probs = torch.tensor([[distance]], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=dtype)
    loss, stats = POLICY_LOSSES[name](log_probs, zero, zero + advantage, zero == 0, SETTINGS)
    loss.sum().backward()
    assert loss.dtype == dtype and all(s.dtype == dtype and not s.requires_grad for s in stats.values())
    assert all(x.isfinite().all() for x in (loss, log_probs.grad, *stats.values()))


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_sequence_whose_ratio_is_cut_off_has_no_gradient(advantage):
    """GSPO's mean log-ratio of the first row is 25, beyond the limit of 20; that of the second is 0."""
    log_probs = torch.tensor([[20.0, 30.0], [1.0, -1.0]], requires_grad=True)
    zeros = torch.zeros(2, 2)
    POLICY_LOSSES["gspo"](log_probs, zeros, zeros + advantage, zeros == 0, SETTINGS)[0].sum().backward()
    assert log_probs.grad.tolist() == [[0, 0], [-advantage, -advantage]]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_the_trained_policy_gets_a_gradient(name):
    tensors = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    POLICY_LOSSES[name](*tensors, torch.ones(2, 3).bool(), SETTINGS)[0].sum().backward()
    assert [t.grad is not None for t in tensors] == [True, False, False]


def test_only_the_trained_values_get_a_gradient():
    value, old, returns = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    value_loss(value, old, returns, 0.5)[0].sum().backward()
    assert [t.grad is not None for t in (value, old, returns)] == [True, False, False]


@pytest.mark.parametrize("c", [1.0, 0.5, math.nan])
def test_dual_clip_must_exceed_one(c):
    with pytest.raises(ValueError, match=r"clip_ratio_c: got .*, expected a number above 1"):
        policy([1.0], [1.0], clip_c=c)


# ------------------------------------------------------------------- the other losses, by plain loops over floats


def naive_gspo(new, old, advantages, s):
    """Per sequence, GSPO's own formula: one ratio, one clip; sequences with one advantage."""
    ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
    bounded = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
    clips = [-a * bounded > -a * ratio for a in advantages]
    loss = [max(-a * ratio, -a * bounded) for a in advantages]
    # d s / d log p_t = s / length, and the row's equal losses each have it.
    return (
        loss,
        [0.0 if clip else -a * ratio for clip, a in zip(clips, advantages, strict=True)],
        {"clip_fraction": clips},
    )


def naive_cispo(new, old, advantages, s):
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    weights = [min(max(r, 1 - s.clip_low), 1 + s.clip_high) for r in ratios]
    loss = [-w * a * n for w, a, n in zip(weights, advantages, new, strict=True)]
    gradient = [-w * a for w, a in zip(weights, advantages, strict=True)]
    return loss, gradient, {"clip_fraction": [w != r for w, r in zip(weights, ratios, strict=True)]}


def naive_sapo(new, old, advantages, s):
    loss, gradient = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        tau, ratio = s.tau_pos if a > 0 else s.tau_neg, math.exp(n - o)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        loss.append(-a * 4 / tau * gate)
        gradient.append(-a * 4 * gate * (1 - gate) * ratio)  # the paper's weight: 4 p (1 - p) r
    return loss, gradient, {}


def naive_geo_mean(new, old, advantages, s):
    """The root of the product of clipped ratios, as the paper writes it; a row has one advantage."""
    a, product, clips = advantages[0], 1.0, []
    sign = 1 if a > 0 else -1
    for n, o in zip(new, old, strict=True):
        ratio = math.exp(n - o)
        bounded = min(max(ratio, math.exp(-s.clip_low)), math.exp(s.clip_high))
        kept = min(ratio**sign, bounded**sign) ** sign
        clips.append(not math.isclose(kept, ratio, rel_tol=1e-14))
        product *= kept
    ratio = product ** (1 / len(new))
    # Each of the row's equal losses has 1 / length of this.
    gradient = [0.0 if clip else -a * ratio for clip in clips]
    return [-a * ratio] * len(new), gradient, {"clip_fraction": clips}


NAIVE = {"gspo": naive_gspo, "cispo": naive_cispo, "sapo": naive_sapo, "geo_mean": naive_geo_mean}


@pytest.mark.parametrize("name", NAIVE)
@given(
    seed=st.integers(0, 9999), low=st.floats(0.01, 0.9), high=st.floats(0.01, 2), spread=st.sampled_from([0.05, 1.0])
)
def test_losses_like_their_formulas(name, seed, low, high, spread):
    """Rows of several lengths, an empty one among them, with gaps; loss, gradient of each row's sum, statistics."""
    source = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 6, generator=source) < 0.6
    mask[0] = False
    new, old = (-2 + spread * torch.randn(4, 6, generator=source, dtype=F64) for _ in range(2))
    advantages = torch.randn(4, 1, generator=source, dtype=F64).expand(4, 6)
    settings = LossSettings(low, high, tau_pos=1.3, tau_neg=0.7)
    new.requires_grad_()
    loss, stats = POLICY_LOSSES[name](new, old, advantages, mask, settings)
    (gradient,) = torch.autograd.grad((loss * mask).sum(), new)
    assert not gradient[~mask].any()
    for row in range(1, 4):
        if not mask[row].any():
            continue
        n, o, a = (x[row][mask[row]].tolist() for x in (new.detach(), old, advantages))
        expected_loss, expected_gradient, expected_stats = NAIVE[name](n, o, a, settings)
        assert loss[row][mask[row]].tolist() == pytest.approx(expected_loss, rel=1e-11, abs=1e-12)
        assert gradient[row][mask[row]].tolist() == pytest.approx(expected_gradient, rel=1e-11, abs=1e-12)
        assert {key: x[row][mask[row]].bool().tolist() for key, x in stats.items()} == expected_stats


def test_every_loss_of_the_configuration_is_there():
    assert tuple(POLICY_LOSSES) == LOSS_MODES


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_where_the_policy_has_not_moved_every_loss_has_the_policy_gradient(name):
    log_probs = -torch.rand(3, 5, dtype=F64)
    mask = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    advantages = torch.tensor([[2.0], [-1.0], [0.5]], dtype=F64).expand(3, 5)
    moving = log_probs.clone().requires_grad_()
    loss, _ = POLICY_LOSSES[name](moving, log_probs, advantages, mask, SETTINGS)
    (gradient,) = torch.autograd.grad((loss * mask).sum(), moving)
    torch.testing.assert_close(gradient, -advantages * mask, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 9999), mode=st.sampled_from(AGGREGATION_MODES), cuts=st.sets(st.integers(1, 5)))
def test_the_gradient_of_a_mini_batch_does_not_depend_on_its_cut_order_and_padding(name, seed, mode, cuts):
    """Whole, and in parts of reordered rows, each padded on both sides with numbers that must not be read."""
    source = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 5, generator=source) < 0.6
    new, old, advantages = (torch.randn(6, 5, generator=source, dtype=F64) for _ in range(3))

    def gradient(rows, left, right):
        own = torch.nn.functional.pad(new[rows], (left, right), value=3.0).requires_grad_()
        pads = [torch.nn.functional.pad(x[rows], (left, right), value=-2.0) for x in (old, advantages)]
        counts = torch.nn.functional.pad(mask[rows], (left, right), value=False)
        loss, _ = POLICY_LOSSES[name](own, *pads, counts, SETTINGS)
        total = (token_weights(counts, mode, 5, F64) * loss).sum() / denominator(mask, mode).clamp(min=1)
        return torch.autograd.grad(total, own)[0][:, left : left + 5]

    order, parts = torch.randperm(6, generator=source), torch.empty_like(new)
    bounds = [0, *sorted(cuts), 6]
    for number, (first, last) in enumerate(pairwise(bounds)):
        parts[order[first:last]] = gradient(order[first:last], left=number, right=2 - number % 3)
    whole = gradient(torch.arange(6), 0, 0)
    assert (parts - whole).norm() <= 1e-13 * whole.norm()


def test_gspo_with_an_advantage_per_token_shares_the_ratio_only():
    """GSPO-token: each token's gradient has its own advantage and the sequence's ratio."""
    new, old = torch.tensor([[-1.0, -2.0]], dtype=F64).requires_grad_(), torch.tensor([[-1.2, -2.0]], dtype=F64)
    advantages = torch.tensor([[1.0, -3.0]], dtype=F64)
    loss, _ = POLICY_LOSSES["gspo"](new, old, advantages, torch.ones(1, 2).bool(), SETTINGS)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    ratio = math.exp(0.1)
    assert loss[0].tolist() == pytest.approx([-ratio, 3 * ratio]) == gradient[0].tolist()


@pytest.mark.parametrize(("pos", "neg"), [(0.0, 1.0), (1.0, -1.0)])
def test_temperatures_must_be_positive(pos, neg):
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="tau_pos, tau_neg: got"):
        POLICY_LOSSES["sapo"](one, one, one, one.bool(), LossSettings(LOW, HIGH, tau_pos=pos, tau_neg=neg))


# ------------------------------------------------------------------------------------------------------ the critic


def test_value_loss_by_hand():
    values = torch.tensor([[1.0, 2.0, 2.0, -1.0, 0.0]], dtype=F64, requires_grad=True)
    old = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]], dtype=F64)
    returns = torch.tensor([[3.0, 3.0, 0.0, -2.0, 0.0]], dtype=F64)
    loss, stats = value_loss(values, old, returns, clip=0.5)
    # clipped values 1, 1.5, 1.5, -0.5, 0; the larger squared error: 4, 2.25, 4, 2.25, 0
    assert loss.tolist() == [[2.0, 1.125, 2.0, 1.125, 0.0]]
    assert stats["clip_fraction"].tolist() == [[0, 1, 0, 1, 0]] and not stats["clip_fraction"].requires_grad
    loss.sum().backward()
    assert values.grad.tolist() == [[-2.0, 0.0, 2.0, 0.0, 0.0]]


def test_value_clip_can_be_switched_off_and_must_be_positive():
    one, far = torch.ones(1, 1), torch.full((1, 1), 100.0)
    assert value_loss(one, far, one + 1, math.inf)[0].item() == 0.5
    with pytest.raises(ValueError, match="cliprange_value: got 0"):
        value_loss(one, one, one, 0.0)
