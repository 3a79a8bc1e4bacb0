import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.losses import policy_loss, value_loss

F64 = torch.float64
LOW, HIGH, C = 0.2, 0.3, 3.0


def policy(ratios, advantages, **kwargs):
    """Loss, stats and d loss / d log-prob of tokens with these ratios."""
    log_probs = torch.tensor([ratios], dtype=F64).log().requires_grad_()
    advantages = torch.tensor([advantages], dtype=F64)
    bounds = {"clip_low": LOW, "clip_high": HIGH, "clip_c": C, **kwargs}
    loss, stats = policy_loss(log_probs, torch.zeros_like(log_probs), advantages, **bounds)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss[0].tolist(), {k: v[0].tolist() for k, v in stats.items()}, gradient[0].tolist()


def test_policy_loss_by_hand():
    ratios = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5, 4.0, 1.0]
    advantages = [2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 0.0]
    loss, stats, gradient = policy(ratios, advantages)
    assert loss == pytest.approx([-2, -2.2, -2.6, -1, 3, 1.6, 6, 0], abs=1e-12)
    assert gradient == pytest.approx([-2, -2.2, 0, -1, 3, 0, 0, 0], abs=1e-12)
    assert stats["clipped"] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert stats["clipped_lower"] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert stats["ratio"] == pytest.approx(ratios, abs=1e-12)
    assert stats["approx_kl"] == pytest.approx([-math.log(r) for r in ratios], abs=1e-12)


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


def test_on_policy_gradient_is_the_policy_gradient_exactly():
    advantages = [3.0, -0.7, 1e-3, 0.0]
    _, stats, gradient = policy([1.0] * 4, advantages)
    assert gradient == [-a for a in advantages]
    assert stats["ratio"] == [1.0] * 4 and not any(stats["clipped"] + stats["clipped_lower"])


def test_dual_clip_can_be_switched_off():
    loss, stats, gradient = policy([100.0, 1.0], [-1.0, 1.0], clip_c=math.inf)
    assert (
        loss == pytest.approx([100, -1]) and gradient == pytest.approx([100, -1]) and stats["clipped_lower"] == [0, 0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("distance", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_policy_loss_stays_finite_far_from_the_sampler(dtype, distance, advantage):
    log_probs = torch.tensor([[distance]], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=dtype)
    loss, stats = policy_loss(log_probs, zero, zero + advantage, LOW, HIGH, C)
    loss.sum().backward()
    assert loss.dtype == dtype and all(s.dtype == dtype and not s.requires_grad for s in stats.values())
    assert all(x.isfinite().all() for x in (loss, log_probs.grad, *stats.values()))
    assert stats["approx_kl"].item() == -distance


def test_only_the_trained_policy_gets_a_gradient():
    tensors = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    policy_loss(*tensors, LOW, HIGH, C)[0].sum().backward()
    value, old, returns = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    value_loss(value, old, returns, 0.5)[0].sum().backward()
    assert [t.grad is not None for t in (*tensors, value, old, returns)] == [True, False, False, True, False, False]


@pytest.mark.parametrize("c", [1.0, 0.5, math.nan])
def test_dual_clip_must_exceed_one(c):
    with pytest.raises(ValueError, match=r"clip_ratio_c: got .*, expected a number above 1"):
        policy([1.0], [1.0], clip_c=c)


def test_value_loss_by_hand():
    values = torch.tensor([[1.0, 2.0, 2.0, -1.0, 0.0]], dtype=F64, requires_grad=True)
    old = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]], dtype=F64)
    returns = torch.tensor([[3.0, 3.0, 0.0, -2.0, 0.0]], dtype=F64)
    loss, stats = value_loss(values, old, returns, clip=0.5)
    # clipped values 1, 1.5, 1.5, -0.5, 0; the larger squared error: 4, 2.25, 4, 2.25, 0
    assert loss.tolist() == [[2.0, 1.125, 2.0, 1.125, 0.0]]
    assert stats["clipped"].tolist() == [[0, 1, 0, 1, 0]] and not stats["clipped"].requires_grad
    loss.sum().backward()
    assert values.grad.tolist() == [[-2.0, 0.0, 2.0, 0.0, 0.0]]


@given(*[st.floats(-10, 10)] * 3, st.floats(0.01, 5))
def test_value_loss_like_the_formula(value, old, target, clip):
    tensors = [torch.tensor([[x]], dtype=F64) for x in (value, old, target)]
    tensors[0].requires_grad_()
    loss, _ = value_loss(*tensors, clip)
    near = min(max(value, old - clip), old + clip)
    assert loss.item() == pytest.approx(0.5 * max((value - target) ** 2, (near - target) ** 2), abs=1e-9)
    loss.sum().backward()
    gradient = tensors[0].grad.item()
    assert gradient == 0 or (gradient > 0) == (value > target)


def test_value_clip_can_be_switched_off_and_must_be_positive():
    one, far = torch.ones(1, 1), torch.full((1, 1), 100.0)
    assert value_loss(one, far, one + 1, math.inf)[0].item() == 0.5
    with pytest.raises(ValueError, match="cliprange_value: got 0"):
        value_loss(one, one, one, 0.0)
