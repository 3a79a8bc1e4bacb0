import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.rollout_correction import accepted, importance_weights, mismatch_figures, mismatch_sums, not_vetoed
from rlx.config.schema import REJECTIONS

F64 = torch.float64


def figures(trainer, sampler, mask):
    sums, largest = mismatch_sums(trainer, sampler, mask)
    return mismatch_figures({name: total.item() for name, total in sums.items()}, largest.item())


def from_ratios(rows, sampler=-2.0):
    """Log-probs of rows with these token ratios, padded with nonsense that the mask leaves out."""
    width = max(map(len, rows)) + 1
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    ratios = torch.tensor([[*row, *[7.0] * (width - len(row))] for row in rows], dtype=F64)
    sampled = torch.full_like(ratios, sampler)
    return sampled + ratios.log(), sampled, mask


# Measuring


def test_figures_by_hand():
    found = figures(*from_ratios([[2.5, 0.4], [1.0]]))
    log = math.log(2.5)
    assert found == pytest.approx(
        {
            "mean_abs_log_prob": 2 * log / 3,
            "max_abs_log_prob": log,
            "kl_k1": 0.0,
            "kl_k3": (1.5 + -0.6 + 0) / 3,
            "ess_token": 3.9**2 / (3 * (6.25 + 0.16 + 1)),
            "ess_sequence": 1.0,
            "ratio_beyond_2": 2 / 3,
            "perplexity_trainer": math.exp(2),
            "perplexity_sampler": math.exp(2),
        },
        abs=1e-12,
    )
    found = figures(*from_ratios([[2.0, 2.0], [1.0]]))
    assert found["ess_sequence"] == pytest.approx(5**2 / (2 * 17))
    assert found["kl_k1"] == pytest.approx(-2 * math.log(2) / 3), "the trainer finds the tokens likelier"
    assert found["perplexity_trainer"] == pytest.approx(math.exp(2 - 2 * math.log(2) / 3))


def test_both_estimates_are_of_the_kl_from_sampler_to_trainer():
    """Tokens in the sampler's proportions, so that means are expectations: KL(sampler || trainer) = 0.25 ln 2."""
    sampler = torch.tensor([[0.5, 0.5, 0.25, 0.25]], dtype=F64).log()
    trainer = torch.tensor([[0.25, 0.25, 0.25, 0.5]], dtype=F64).log()
    found = figures(trainer, sampler, torch.ones(1, 4, dtype=torch.bool))
    assert found["kl_k1"] == pytest.approx(0.25 * math.log(2))
    assert found["kl_k3"] == pytest.approx(0.25 * math.log(2))


def test_equal_policies_agree_in_every_figure():
    log_probs = torch.randn(4, 5) - 3
    found = figures(log_probs, log_probs.clone(), torch.rand(4, 5) < 0.8)
    assert [found[name] for name in ("mean_abs_log_prob", "max_abs_log_prob", "kl_k1", "kl_k3", "ratio_beyond_2")] == [
        0
    ] * 5
    assert found["ess_token"] == found["ess_sequence"] == 1
    assert found["perplexity_trainer"] == found["perplexity_sampler"]


def test_nothing_is_measured_without_tokens():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert figures(torch.randn(2, 3), torch.randn(2, 3), nothing) == {}


def test_policies_far_apart_have_finite_figures():
    found = figures(
        *(torch.tensor([[0.0, -5000.0], [-1e4, 0.0]]), torch.tensor([[-1e4, 0.0], [0.0, 0.0]]), torch.ones(2, 2).bool())
    )
    assert all(math.isfinite(x) for x in found.values())
    assert found["max_abs_log_prob"] == 1e4 and 0 < found["ess_sequence"] <= 0.5


batches = (
    st.integers(1, 5)
    .flatmap(
        lambda rows: st.lists(st.lists(st.floats(0.01, 100), min_size=0, max_size=6), min_size=rows, max_size=rows)
    )
    .filter(lambda rows: any(rows))
)


@given(batches, st.randoms(use_true_random=False))
def test_figures_do_not_depend_on_order_parts_or_padding(rows, random):
    trainer, sampler, mask = from_ratios(rows)
    whole = figures(trainer, sampler, mask)
    order = random.sample(range(len(rows)), len(rows))
    assert figures(trainer[order], sampler[order], mask[order]) == pytest.approx(whole, rel=1e-9, abs=1e-12)
    wide = [torch.nn.functional.pad(x, (2, 3), value=v) for x, v in ((trainer, -9.0), (sampler, -1.0), (mask, False))]
    assert figures(*wide) == pytest.approx(whole, rel=1e-9, abs=1e-12)
    parts = [mismatch_sums(trainer[[row]], sampler[[row]], mask[[row]]) for row in order]
    sums = {name: sum(part[name].item() for part, _ in parts) for name in parts[0][0]}
    assert mismatch_figures(sums, max(largest.item() for _, largest in parts)) == pytest.approx(
        whole, rel=1e-9, abs=1e-12
    )
    assert 0 < whole["ess_token"] <= 1 + 1e-12 and whole["kl_k3"] >= 0


# Weights


def weights_of(rows, level, low=None, high=2.0, normalize=False):
    return importance_weights(*from_ratios(rows), level, low, high, normalize)


def test_weights_by_hand():
    rows = [[0.5, 3.0, 0.25], [4.0, 1.0]]
    assert weights_of(rows, "token").tolist() == [[0.5, 2, 0.25, 0], [2, 1, 0, 0]]
    assert weights_of(rows, "sequence").tolist() == [pytest.approx([0.375] * 3 + [0]), [2, 2, 0, 0]]
    assert weights_of(rows, "token", 0.4, 3.5).tolist() == [[0.5, pytest.approx(3), 0, 0], [0, 1, 0, 0]]
    assert weights_of(rows, "sequence", 0.5, 4.5).tolist() == [[0] * 4, [4, 4, 0, 0]]


def test_normalized_weights_have_mean_one_over_tokens_or_sequences():
    rows = [[0.5, 3.0, 0.25], [4.0, 1.0]]
    assert weights_of(rows, "token", normalize=True).sum().item() == pytest.approx(5)
    sequences = weights_of(rows, "sequence", normalize=True)
    assert sequences[:, 0].mean().item() == pytest.approx(1)
    assert sequences[1, 0] / sequences[0, 0] == pytest.approx(2 / 0.375)
    assert not weights_of([[9.0]], "token", 0.5, 2.0, normalize=True).any(), "nothing left to normalize"


def reference(rows, level, low, high):
    """The formulas as loops over Python numbers."""
    result = []
    for row in rows:
        product = math.exp(sum(map(math.log, row)))
        ratios = row if level == "token" else [product] * len(row)
        result += [min(r, high) if low is None else (r if low <= r <= high else 0.0) for r in ratios]
    return result


@given(batches, st.sampled_from(["token", "sequence"]), st.one_of(st.none(), st.floats(0.1, 0.9)), st.floats(1, 5))
def test_weights_like_the_formula_and_within_bounds(rows, level, low, high):
    trainer, sampler, mask = from_ratios(rows)
    found = importance_weights(trainer, sampler, mask, level, low, high, normalize=False)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert not found[~mask].any()
    assert found.max() <= high * (1 + 1e-6)
    if low is not None:
        assert ((found == 0) | (found >= low * (1 - 1e-6))).all()
    want = reference(rows, level, low, high)
    near_a_bound = [any(abs(w - b) < 1e-9 for b in (low or high, high)) for w in want]
    assert all(
        near or got == pytest.approx(w, rel=1e-5)
        for got, w, near in zip(found[mask].tolist(), want, near_a_bound, strict=True)
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("low", [None, 0.5])
def test_equal_policies_have_weights_of_exactly_one(level, normalize, low):
    log_probs, mask = torch.randn(3, 6) - 4, torch.rand(3, 6) < 0.7
    found = importance_weights(log_probs, log_probs.clone(), mask, level, low, 2.0, normalize)
    assert torch.equal(found, mask.float())


def test_extreme_ratios_have_finite_weights():
    trainer, sampler = torch.tensor([[0.0, -1e4, -math.inf]]), torch.tensor([[-1e4, 0.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert importance_weights(trainer, sampler, mask, "token", None, 2.0, False).tolist() == [[2.0, 0.0, 0.0]]
    assert importance_weights(trainer, sampler, mask, "sequence", None, 2.0, False).tolist() == [[0.0] * 3]


@pytest.mark.parametrize("criterion", REJECTIONS)
@pytest.mark.parametrize("impossible", ["trainer", "sampler"])
def test_a_token_that_one_policy_never_writes_passes_no_test(criterion, impossible):
    never, usual = torch.tensor([[-math.inf]]), torch.tensor([[-1.0]])
    compared = (never, usual) if impossible == "trainer" else (usual, never)
    assert not accepted(*compared, torch.ones(1, 1, dtype=torch.bool), criterion, None, 1e30).any()


# Rejection

ROWS = [[1.1, 0.9], [2.5, 0.6, 1.0], [1.0, 0.3]]


@pytest.mark.parametrize(
    ("criterion", "low", "high", "left"),
    [
        ("token_k1", 0.5, 2.0, [[1, 1], [0, 1, 1], [1, 0]]),
        ("token_k1", 0.2, 2.4, [[1, 1], [0, 1, 1], [1, 1]]),
        ("token_k1", None, 2.0, [[1, 1], [0, 1, 1], [1, 0]]),
        ("seq_sum_k1", 0.5, 2.0, [[1, 1], [1, 1, 1], [0, 0]]),  # 0.99, 1.5, 0.3
        ("seq_sum_k1", 0.2, 1.1, [[1, 1], [0, 0, 0], [1, 1]]),
        ("seq_mean_k1", 0.99, 1.05, [[1, 1], [0, 0, 0], [0, 0]]),  # 0.995, 1.145, 0.548
        ("seq_mean_k1", 0.5, 1.05, [[1, 1], [0, 0, 0], [1, 1]]),
        ("seq_mean_k3", None, 0.2, [[1, 1], [0, 0, 0], [0, 0]]),  # 0.005, 0.231, 0.252
        ("seq_mean_k3", None, 0.24, [[1, 1], [1, 1, 1], [0, 0]]),
        ("seq_max_k2", None, 0.5, [[1, 1], [1, 1, 1], [0, 0]]),  # 0.006, 0.420, 0.725
        ("seq_max_k2", None, 0.41, [[1, 1], [0, 0, 0], [0, 0]]),
    ],
)
def test_rejection_by_hand(criterion, low, high, left):
    found = accepted(*from_ratios(ROWS), criterion, low, high)
    assert [row[: len(want)].int().tolist() for row, want in zip(found, left, strict=True)] == left
    assert not found[:, 3].any()


def test_a_geometric_mean_does_not_grow_with_the_length():
    rows = [[1.01] * 3, [1.01] * 300]
    assert accepted(*from_ratios(rows), "seq_mean_k1", 0.98, 1.02).sum().item() == 303
    assert accepted(*from_ratios(rows), "seq_sum_k1", 0.98, 1.1).sum().item() == 3


def test_one_hopeless_token_vetoes_its_sequence():
    found = not_vetoed(*from_ratios([[1.0, 1e-5, 1.0], [1e-3, 5.0], []]), 1e-4)
    assert found.sum(dim=1).tolist() == [0, 2, 0]


@given(batches, st.sampled_from(REJECTIONS), st.floats(1.01, 10), st.randoms(use_true_random=False))
def test_rejection_is_by_row_and_keeps_within_the_mask(rows, criterion, high, random):
    trainer, sampler, mask = from_ratios(rows)
    found = accepted(trainer, sampler, mask, criterion, None, high)
    assert not (found & ~mask).any()
    assert accepted(sampler, sampler, mask, criterion, None, high).equal(mask), "equal policies pass every test"
    order = random.sample(range(len(rows)), len(rows))
    assert accepted(trainer[order], sampler[order], mask[order], criterion, None, high).equal(found[order])
    if criterion != "token_k1":
        assert all(
            row.any() == kept.all() for row, kept in ((f, f[m]) for f, m in zip(found, mask, strict=True)) if len(kept)
        )


def test_what_cannot_be_compared_is_refused():
    logs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        mismatch_sums(logs, logs[:, :2], mask)
    with pytest.raises(ValueError, match="bool"):
        not_vetoed(logs, logs, mask.float(), 0.1)
    with pytest.raises(ValueError, match="rollout_is"):
        importance_weights(logs, logs, mask, "geometric", None, 2.0, False)
    with pytest.raises(ValueError, match="rollout_rs"):
        accepted(logs, logs, mask, "token", 0.5, 2.0)
