import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.models import log_probs as module
from rlx.models.log_probs import token_log_probs

F64 = torch.float64


@pytest.fixture(params=[1, 50, 1 << 24])
def chunk_elements(request, monkeypatch):
    """One token at a time, a few, and all at once."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)


def reference(logits, ids, temperature):
    """Straight from the definitions, in the widest type."""
    every = (logits.to(F64) / temperature).log_softmax(dim=-1)
    return every.gather(-1, ids.unsqueeze(-1)).squeeze(-1), torch.special.entr(every.exp()).sum(dim=-1)


def make(shape, dtype=F64, scale=3.0, seed=0):
    source = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*shape, generator=source, dtype=F64)).to(dtype)
    return logits, torch.randint(shape[-1], shape[:-1], generator=source)


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=F64)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]), 1.0, True)
    assert log_probs.item() == pytest.approx(math.log(0.75), abs=1e-15)
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), abs=1e-15)
    # At half the temperature the odds are squared: 9 to 1.
    assert token_log_probs(logits, torch.tensor([0]), 0.5, False)[0].item() == pytest.approx(math.log(0.1), abs=1e-15)


@pytest.mark.usefixtures("chunk_elements")
@pytest.mark.parametrize("shape", [(5, 11), (3, 4, 11), (2, 3, 2, 11), (0, 11), (2, 0, 11), (0, 3, 11)])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_like_log_softmax_with_gradients(shape, temperature):
    logits, ids = make(shape)
    logits.requires_grad_()
    got, expected = token_log_probs(logits, ids, temperature, True), reference(logits, ids, temperature)
    weights = torch.randn(2, *shape[:-1], generator=torch.Generator().manual_seed(1), dtype=F64)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == ids.shape and torch.allclose(a, b, rtol=0, atol=1e-13)
    gradients = [torch.autograd.grad((weights[0] * lp + weights[1] * h).sum(), logits)[0] for lp, h in (got, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("chunk_elements")
def test_gradcheck():
    logits, ids = make((2, 3, 7))
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, ids, 0.8, True), (logits,))
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, ids, 0.8, True)[1], (logits,))
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, ids, 0.8, False)[0], (logits,))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), scale=st.sampled_from([0.1, 10.0, 1e4]), temperature=st.sampled_from([1.0, 0.3]))
def test_fp32_equals_log_softmax_bit_for_bit(seed, scale, temperature):
    logits, ids = make((4, 5, 33), torch.float32, scale, seed)
    log_probs, entropy = token_log_probs(logits, ids, temperature, True)
    every = (logits / temperature).log_softmax(dim=-1)
    assert torch.equal(log_probs, every.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
    assert torch.allclose(entropy, reference(logits, ids, temperature)[1].float(), rtol=1e-5, atol=1e-6)
    assert (entropy > -1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_dtypes(dtype):
    logits, ids = make((4, 65), dtype)
    logits.requires_grad_()
    wide = F64 if dtype == F64 else torch.float32
    log_probs, entropy = token_log_probs(logits, ids, 0.7, True)
    assert (log_probs.dtype, entropy.dtype) == (wide, wide)
    exact = reference(logits, ids, 0.7)
    assert torch.allclose(log_probs.double(), exact[0], rtol=0, atol=1e-5)
    assert torch.allclose(entropy.double(), exact[1], rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    (exact_gradient,) = torch.autograd.grad(exact[0].sum(), logits)
    assert gradient.dtype == dtype
    assert torch.allclose(gradient, exact_gradient, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


@pytest.mark.usefixtures("chunk_elements")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_impossible_tokens(temperature):
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, -torch.inf, -torch.inf]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 0]), temperature, True)
    assert log_probs.tolist() == [-math.inf, 0.0]
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0])
    (1e6 * entropy.sum() + log_probs.sum()).backward()
    # Row 0: [i = k] - p_k from the log-prob, nothing from the entropy at its maximum over the possible tokens.
    expected = [[-0.5 / temperature, 1 / temperature, -0.5 / temperature], [0.0, 0.0, 0.0]]
    assert torch.allclose(logits.grad, torch.tensor(expected), rtol=0, atol=0.2)
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0] and logits.grad[0, 1] == 1 / temperature


def test_large_logits():
    logits = torch.tensor([[1e6, 1e6 - 1, -1e30], [3e38, -3e38, 0.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 0]), 1.0, True)
    assert log_probs.tolist() == pytest.approx([-1 - math.log1p(math.exp(-1)), 0.0], abs=1e-6)
    p = 1 / (1 + math.e)
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p), 0.0], abs=1e-6)
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_descent_raises_the_chosen_token_and_entropy_bonus_flattens():
    logits, ids = make((3, 9))
    logits.requires_grad_()
    for pick in (0, 1):
        before = token_log_probs(logits, ids, 1.0, True)[pick]
        (gradient,) = torch.autograd.grad(before.sum(), logits)
        after = token_log_probs(logits + 1e-3 * gradient, ids, 1.0, True)[pick]
        assert (after > before).all()


def test_entropy_for_the_log_only_changes_no_gradient():
    logits, ids = make((3, 9), torch.float32)
    logits.requires_grad_()
    gradients = [
        torch.autograd.grad(token_log_probs(logits, ids, 0.9, flag)[0].sum(), logits)[0] for flag in (False, True)
    ]
    assert torch.equal(*gradients)
    assert token_log_probs(logits, ids, 0.9, False)[1] is None
    with torch.no_grad():
        assert token_log_probs(logits, ids, 0.9, True)[1].grad_fn is None


def largest_allocation(run):
    """Bytes of the largest single allocation while `run` runs, backward included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_no_full_copy_in_fp32_in_forward_and_backward(monkeypatch, temperature, with_entropy):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3200)
    whole, ids = make((4, 10, 320), torch.bfloat16)
    whole.requires_grad_()
    view, view_ids = whole[:, 2:8], ids[:, 2:8]  # no contiguous memory: must not be copied either
    results = []

    def forward():
        results[:] = [x for x in token_log_probs(view, view_ids, temperature, with_entropy) if x is not None]

    def backward():
        torch.autograd.grad(sum(x.sum() for x in results), view)

    view_bytes = view.numel() * view.element_size()
    assert largest_allocation(lambda: view.float()) == 2 * view_bytes
    assert largest_allocation(forward) <= 3200 * 4 < view_bytes
    assert largest_allocation(backward) == view_bytes


def test_inputs_are_left_alone():
    logits, ids = make((4, 33), torch.float32)
    logits[0, 0] = -torch.inf
    before = logits.clone()
    logits.requires_grad_()
    log_probs, entropy = token_log_probs(logits, ids, 1.0, True)
    (log_probs + entropy).sum().backward()
    assert torch.equal(logits, before)


def test_errors():
    logits, ids = make((2, 3, 5))
    with pytest.raises(ValueError, match=r"got logits \(2, 3, 5\) and ids \(2, 2\)"):
        token_log_probs(logits, ids[:, :2], 1.0, False)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature: got"):
            token_log_probs(logits, ids, temperature, False)
