"""The sampler's mismatch in a batch, against numbers worked out by hand."""

import math

import pytest
import torch

from rlx.algorithms.rollout_correction import mismatch_sums
from rlx.config.schema import RolloutCorrectionConfig
from rlx.data.batch import Batch
from rlx.trainer.learning import correct
from rlx.trainer.step_metrics import mismatch, split_off


@pytest.fixture
def batch():
    """Two rows with ratios 0.5, 4 and 1, 1, 1; behind the first lies padding that disagrees wildly."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    ids = torch.zeros(2, 4, dtype=torch.int64)
    sampler = torch.full((2, 3), -3.0)
    ratios = torch.tensor([[0.5, 4.0, 99.0], [1.0, 1.0, 1.0]])
    columns = {"response_mask": mask, "rollout_log_probs": sampler, "old_log_probs": sampler + ratios.log()}
    attention = torch.cat([torch.ones(2, 1, dtype=torch.bool), mask], dim=1)
    return Batch.of({"input_ids": ids, "attention_mask": attention, **columns})


def test_the_mismatch_is_measured_wherever_the_sampler_returned_log_probs(batch):
    figures = mismatch(batch)
    assert figures["mismatch/mean_abs_log_prob"] == pytest.approx(math.log(8) / 5)
    assert figures["mismatch/max_abs_log_prob"] == pytest.approx(math.log(4))
    assert figures["mismatch/kl_k1"] == pytest.approx(-math.log(2) / 5)
    assert figures["mismatch/ess_sequence"] == pytest.approx(0.9)
    assert mismatch(batch.drop("rollout_log_probs")) == {}


def test_the_share_of_differing_experts_is_that_of_response_tokens(batch):
    shares = torch.tensor([[0.5, 0.0, 1.0], [0.25, 0.0, 0.5]])
    figures = mismatch(batch.with_(differing_experts=shares, differing_experts_used=shares * 0))
    assert figures["mismatch/differing_experts"] == pytest.approx(1.25 / 5)
    assert figures["mismatch/differing_experts_used"] == 0


def test_nothing_is_corrected_unless_asked_for(batch):
    for columns in (batch, batch.drop("rollout_log_probs")):
        same, metrics = correct(columns, RolloutCorrectionConfig())
        assert same is columns and metrics == {}


@pytest.mark.parametrize(
    ("threshold", "weights", "zero"), [("2.0", [[0.5, 2, 0], [1, 1, 1]], 0.0), ("0.6_5.0", [[0, 4, 0], [1, 1, 1]], 0.2)]
)
def test_weights_are_written(batch, threshold, weights, zero):
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold)
    corrected, metrics = correct(batch, correction)
    torch.testing.assert_close(corrected["rollout_is_weights"], torch.tensor(weights, dtype=torch.float32))
    assert "loss_mask" not in corrected
    assert metrics == {
        "correction/weight_mean": pytest.approx(sum(map(sum, weights)) / 5),
        "correction/weight_max": pytest.approx(max(map(max, weights))),
        "correction/weight_zero_share": pytest.approx(zero),
    }


def test_every_test_must_be_passed(batch):
    """The first token fails the first test, the first row the second and the veto."""
    tests = {
        ("token_k1",): ("0.6_5.0",),
        ("seq_max_k2",): ("0.5",),
        ("seq_mean_k1", "seq_sum_k1"): ("0.9_3.0", "0.9_1.5"),
    }
    left = [
        correct(batch, RolloutCorrectionConfig(rollout_rs=names, rollout_rs_threshold=bounds))[0]["loss_mask"]
        for names, bounds in tests.items()
    ]
    assert [mask.int().tolist() for mask in left] == [[[0, 1, 0], [1, 1, 1]], *[[[0, 0, 0], [1, 1, 1]]] * 2]
    both = RolloutCorrectionConfig(
        rollout_rs=("token_k1",), rollout_rs_threshold=("5.0",), rollout_token_veto_threshold=0.6
    )
    corrected, metrics = correct(batch, both)
    assert corrected["loss_mask"].int().tolist() == [[0, 0, 0], [1, 1, 1]]
    assert corrected["response_mask"].equal(batch["response_mask"]), "advantages and critic see the whole batch"
    assert metrics == {"correction/rejected_token_share": pytest.approx(0.4), "correction/rejected_sequence_share": 0.5}


def test_of_updates_with_bypass_the_first_one_tells(batch):
    sums, largest = mismatch_sums(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
    seen = {f"actor/mismatch/{name}": total.item() for name, total in (sums | {"largest": largest}).items()}
    later = dict.fromkeys(seen, math.nan) | {"actor/loss": 2.0}
    rest, figures = split_off([seen | {"actor/loss": 1.0}, later])
    assert rest == [{"actor/loss": 1.0}, {"actor/loss": 2.0}]
    assert figures == mismatch(batch)
    assert split_off([{"critic/loss": 1.0}]) == ([{"critic/loss": 1.0}], {})
