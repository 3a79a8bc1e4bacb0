import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.kl import KLController, kl_estimate
from rlx.config.schema import KL_LOSS_ESTIMATORS

F64 = torch.float64


def estimate(difference, kind):
    """The estimate and its derivative at log_probs - ref_log_probs = difference."""
    reference = torch.tensor([[-3.0]], dtype=F64)
    log_probs = (reference + difference).requires_grad_()
    value = kl_estimate(log_probs, reference, kind)
    (slope,) = torch.autograd.grad(value.sum(), log_probs)
    return value.item(), slope.item()


@pytest.mark.parametrize(
    ("kinds", "difference", "value", "slope"),
    [
        (("kl", "k1"), 0.5, 0.5, 1.0),
        (("kl", "k1"), -0.5, -0.5, 1.0),
        (("abs",), -0.5, 0.5, -1.0),
        (("mse", "k2"), -0.5, 0.125, -0.5),
        # exp(-0.5) - 1 + 0.5, derivative 1 - exp(-0.5)
        (("low_var_kl", "k3"), 0.5, 0.1065306597126334, 0.3934693402873666),
        # exp(0.5) - 1 - 0.5, derivative 1 - exp(0.5)
        (("low_var_kl", "k3"), -0.5, 0.1487212707001282, -0.6487212707001282),
    ],
)
def test_by_hand(kinds, difference, value, slope):
    for kind in kinds:
        assert estimate(difference, kind) == pytest.approx((value, slope), abs=1e-14)


@given(st.integers(0, 999))
def test_expectations(seed):
    """Under the policy's own tokens k1 and k3 average to the KL, and descent on k3 moves the policy to the reference."""
    source = torch.Generator().manual_seed(seed)
    logits, ref_logits = (0.3 * torch.randn(6, generator=source, dtype=F64) for _ in range(2))
    log_probs, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    kl = (log_probs.exp() * (log_probs - ref)).sum()
    for kind in ("k1", "k3"):
        assert torch.isclose((log_probs.exp() * kl_estimate(log_probs, ref, kind)).sum(), kl, rtol=0, atol=1e-12)
    assert (kl_estimate(log_probs, ref, "k3") >= 0).all()
    assert estimate(0.4, "k3")[1] > 0 > estimate(-0.4, "k3")[1]


@given(st.integers(0, 999))
def test_with_a_plus_the_value_stays_and_the_expected_gradient_is_that_of_the_kl(seed):
    """Over the policy's own tokens, against the exact gradient of the KL in the policy's logits."""
    source = torch.Generator().manual_seed(seed)
    logits, ref_logits = (0.5 * torch.randn(6, generator=source, dtype=F64) for _ in range(2))
    logits.requires_grad_()
    log_probs, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits, retain_graph=True)
    for kind in ("kl+", "k1+", "abs+", "low_var_kl+", "k3+"):
        estimates = kl_estimate(log_probs, ref, kind)
        assert torch.equal(estimates, kl_estimate(log_probs, ref, kind[:-1]))
        expected = (log_probs.exp().detach() * estimates).sum()
        (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
        torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12)
    (of_k3,) = torch.autograd.grad((log_probs.exp().detach() * kl_estimate(log_probs, ref, "k3")).sum(), logits)
    assert not torch.allclose(of_k3, exact, rtol=0, atol=1e-6), "without it the gradient is another one"


def test_k3_is_exact_when_the_policies_nearly_agree():
    tiny = torch.tensor([[1e-4]], dtype=torch.float32)
    exact = math.expm1(-float(tiny)) + float(tiny)
    assert kl_estimate(tiny, torch.zeros(1, 1), "k3").item() == pytest.approx(exact, rel=1e-2)
    assert kl_estimate(tiny, tiny, "k3").item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_k3_clamps(dtype):
    log_probs = torch.tensor([[-1e4, -30.0, -3.0, 10.5, 30.0, 1e4]], dtype=dtype, requires_grad=True)
    value = kl_estimate(log_probs, torch.zeros(1, 6, dtype=dtype), "k3")
    value.sum().backward()
    assert value.dtype == dtype
    assert value[0].tolist() == pytest.approx([10, 10, 10, 9.5 + math.exp(-10.5), 10, 10])
    assert log_probs.grad[0].tolist() == pytest.approx([0, 0, 0, 1 - math.exp(-10.5), 0, 0])


def test_kinds_are_those_of_the_configuration():
    zero = torch.zeros(1, 1)
    for kind in KL_LOSS_ESTIMATORS:
        assert kl_estimate(zero, zero, kind).item() == 0
    with pytest.raises(ValueError, match="got 'k4', expected kl, k1"):
        kl_estimate(zero, zero, "k4")


def test_fixed_controller():
    controller = KLController(0.1)
    controller.update(5.0, 1000)
    other = KLController(0.2)
    other.load_state_dict(controller.state_dict())
    assert (controller.coef, other.coef) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("kl", "samples", "factor"),
    [
        (0.1, 500, 1.0),
        (0.11, 500, 1 + 0.1 * 0.5),
        (0.05, 500, 1 - 0.2 * 0.5),
        (9.0, 500, 1 + 0.2 * 0.5),
        (-1.0, 500, 1 - 0.2 * 0.5),
        (0.0, 10**9, 1 - 0.2),
    ],
)
def test_adaptive_controller_by_hand(kl, samples, factor):
    controller = KLController(coef=0.2, target=0.1, horizon=1000)
    controller.update(kl, samples)
    assert controller.coef == pytest.approx(0.2 * factor, rel=1e-12)


def test_adaptive_controller_resumes():
    first, whole = KLController(0.2, 0.1, 1000), KLController(0.2, 0.1, 1000)
    for kl in (0.3, 0.05):
        first.update(kl, 64)
        whole.update(kl, 64)
    resumed = KLController(7.0, 0.1, 1000)
    resumed.load_state_dict(first.state_dict())
    resumed.update(0.12, 64)
    whole.update(0.12, 64)
    assert resumed.coef == whole.coef


def test_errors():
    controller = KLController(0.2, 0.1, 1000)
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match="got a measured KL of"):
            controller.update(kl, 10)
    assert controller.coef == 0.2
    with pytest.raises(ValueError, match=r"resume with algorithm\.kl_ctrl\.type=fixed"):
        controller.load_state_dict(KLController(0.1).state_dict())
    with pytest.raises(ValueError, match=r"resume with algorithm\.kl_ctrl\.type=adaptive"):
        KLController(0.1).load_state_dict(controller.state_dict())
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="kl_coef: got"):
            KLController(bad)
    for target, horizon in ((0.0, 10), (0.1, 0)):
        with pytest.raises(ValueError, match="target_kl: got"):
            KLController(0.1, target, horizon)
