import pytest
import torch

from rlx.rollout.protocol import Sampling
from rlx.rollout.sampling import choose_tokens, request_uniforms

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0, -30.0])


def draw(sampling, count=20_000, logits=LOGITS):
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return choose_tokens(logits.expand(count, -1), uniforms, sampling)


def assert_distributed(tokens, probs):
    """Pearson's statistic below the 99.9 % point of chi-square with 5 degrees of freedom (20.5)."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    assert counts[expected == 0].sum() == 0
    some = expected > 0.5
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < 20.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_tempered_distribution(temperature):
    tokens, log_probs = draw(Sampling(1, temperature=temperature))
    log_probs_V = torch.log_softmax(LOGITS / temperature, dim=-1)
    assert_distributed(tokens, log_probs_V.exp())
    torch.testing.assert_close(log_probs, log_probs_V[tokens])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [0, 3]),
        (100, 1.0, [0, 1, 2, 3, 4, 5]),
        (1, 1.0, [0]),
        (-1, 1e-9, [0]),
        (-1, 0.5, [0]),
        (-1, 0.6, [0, 3]),
        (-1, 0.999999, [0, 1, 2, 3, 4]),
        (2, 0.7, [0]),
        (2, 0.75, [0, 3]),
    ],
)
def test_truncation_keeps_the_right_tokens_renormalised(top_k, top_p, kept):
    # Probabilities: 0: 0.56, 3: 0.21, 1: 0.13, 4: 0.08, 2: 0.03. Of the two likeliest alone: 0.73 and 0.27.
    tokens, log_probs = draw(Sampling(1, top_k=top_k, top_p=top_p))
    probs = torch.softmax(LOGITS, dim=-1)
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept]
    assert_distributed(tokens, cut / cut.sum())
    torch.testing.assert_close(log_probs, probs.log()[tokens])  # of the whole distribution, not of the cut one


def test_equal_logits_are_cut_to_k_all_the_same():
    tokens, _ = draw(Sampling(1, top_k=3), logits=torch.zeros(6))
    assert set(tokens.tolist()) == {0, 1, 2}


def test_greedy_takes_the_first_maximum_with_log_probs_at_temperature_one():
    tokens, log_probs = draw(Sampling(1, temperature=0.0), count=3)
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(log_probs, torch.log_softmax(LOGITS, dim=-1)[:1].expand(3))


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, top_k=4), Sampling(1, top_p=0.99)])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_give_possible_tokens(sampling, uniform):
    logits = torch.tensor([[-float("inf"), 1.0, 0.0, -float("inf")]])
    token, log_prob = choose_tokens(logits, torch.tensor([uniform], dtype=torch.float64), sampling)
    assert token.item() in (1, 2)
    assert log_prob.isfinite().all()


def test_uniforms_depend_on_the_seed_alone():
    rows = request_uniforms([7, 8, 2**63 - 1, 7], 40)
    assert rows.dtype == torch.float64 and rows.min() >= 0 and rows.max() < 1
    assert torch.equal(rows[0], rows[3]) and not torch.equal(rows[0], rows[1])
    assert torch.equal(request_uniforms([8], 40)[0], rows[1])
    assert torch.equal(request_uniforms([8], 17)[0], rows[1, :17])
