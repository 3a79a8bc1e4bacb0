from pathlib import Path

import pytest
import torch

from rlx.algorithms.rollout_correction import mismatch_sums
from rlx.config.schema import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from rlx.data.batch import Batch
from rlx.engine.objectives import PolicyObjective, Totals
from rlx.models.log_probs import token_log_probs
from rlx.user_code import UserCodeError

TOTALS = Totals(denominator=10.0, tokens=8.0)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    columns = {
        name: torch.randn(2, 3) for name in ("advantages", "old_log_probs", "ref_log_probs", "values", "returns")
    }
    attention = torch.cat([torch.ones(2, 1, dtype=torch.bool), mask], dim=1)
    ids = torch.randint(5, (2, 4))
    return Batch.of(columns | {"input_ids": ids, "attention_mask": attention, "response_mask": mask})


@pytest.fixture
def logits():
    return torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)


def share_of(objective, logits, batch):
    """Its share of a micro-batch of which a model gave these logits."""
    log_probs, entropy = token_log_probs(logits, batch.responses(), *objective.distribution[:2])
    return objective.share({"log_probs": log_probs, "entropy": entropy}, batch, TOTALS)


TIS, REJECTION = RolloutCorrectionConfig(rollout_is="token"), RolloutCorrectionConfig(rollout_rs=("token_k1",))


def test_with_bypass_the_update_measures_what_no_other_phase_has(batch, logits):
    objective = PolicyObjective(ActorConfig(), 1.0, 3, RolloutCorrectionConfig(bypass_mode=True))
    share, plain = (share_of(o, logits, batch) for o in (objective, PolicyObjective(ActorConfig(), 1.0, 3)))
    log_probs, entropy = token_log_probs(logits, batch.responses(), 1.0, True)
    sums, largest = mismatch_sums(log_probs, batch["old_log_probs"], batch["response_mask"])
    assert {f"mismatch/{name}": total for name, total in sums.items()}.items() <= share.metrics.items()
    assert share.maxima == {"mismatch/largest": largest}
    assert share.metrics["entropy"] == (entropy.detach() * batch["response_mask"]).sum() / TOTALS.tokens
    assert torch.equal(share.loss, plain.loss)
    assert plain.metrics.items() <= share.metrics.items() and not plain.maxima


OWN = """
def policy_loss(log_probs, old_log_probs, advantages, mask, settings):
    ratio = (log_probs - old_log_probs).exp().clamp(max=1 + settings.clip_high)
    return -advantages * ratio, {"own_ratio": ratio}

def scalar(log_probs, old_log_probs, advantages, mask, settings):
    return -(advantages * log_probs).sum(), {}

def tensor_alone(log_probs, old_log_probs, advantages, mask, settings):
    return -advantages * log_probs

def no_statistics(log_probs, old_log_probs, advantages, mask, settings):
    return -advantages * log_probs, None

def statistics_of_the_batch(log_probs, old_log_probs, advantages, mask, settings):
    return -advantages * log_probs, {"mean": log_probs.mean(), "share": 0.5}

def as_in_verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return 0.0, {}

number = 7
"""


@pytest.fixture
def own(tmp_path):
    """A policy loss of the user's, by its name."""
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: ActorConfig(policy_loss=PolicyLossConfig(path=str(tmp_path / "own.py"), name=name))


def test_a_users_policy_loss_takes_the_place_of_rlxs(batch, logits, own):
    share = share_of(PolicyObjective(own("policy_loss"), 1.0, horizon=3), logits, batch)
    log_probs, _ = token_log_probs(logits, batch.responses(), 1.0, False)
    mask = batch["response_mask"]
    ratio = (log_probs - batch["old_log_probs"]).exp().clamp(max=1.2)
    torch.testing.assert_close(share.loss, -(batch["advantages"] * ratio)[mask].sum() / TOTALS.denominator)
    torch.testing.assert_close(share.metrics["own_ratio"], ratio.detach()[mask].sum() / TOTALS.tokens)
    assert set(share.metrics) == {"pg_loss", "ppo_kl", "own_ratio"}


def test_the_policy_loss_of_the_documentation_works(batch, logits, tmp_path):
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    (tmp_path / "my_loss.py").write_text(page.split("```python\n")[1].split("```")[0])
    actor = ActorConfig(policy_loss=PolicyLossConfig(path=str(tmp_path / "my_loss.py")))
    share = share_of(PolicyObjective(actor, 1.0, horizon=3), logits, batch)
    assert share.loss.requires_grad and "ratio" in share.metrics


@pytest.mark.parametrize("name", ["as_in_verl", "number"])
def test_a_users_policy_loss_is_checked_when_it_is_loaded(own, name):
    with pytest.raises(UserCodeError, match=rf"policy_loss: {name} in .*own\.py is .* f\(log_probs, old_log_probs"):
        PolicyObjective(own(name), 1.0, horizon=3)


def test_a_users_policy_loss_is_one_number_per_token(batch, logits, own):
    with pytest.raises(ValueError, match=r"scalar in .*own\.py: got a loss of shape \(\), expected \(2, 3\)"):
        share_of(PolicyObjective(own("scalar"), 1.0, horizon=3), logits, batch)


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("tensor_alone", [r"returned Tensor, expected \(loss, statistics\): .* shape \(2, 3\)"]),
        ("no_statistics", [r"returned Tensor, NoneType, expected \(loss, statistics\)"]),
        (
            "statistics_of_the_batch",
            [r"statistic 'mean' of shape \(\), expected a tensor of shape \(2, 3\)", r"statistic 'share' of 0.5"],
        ),
    ],
)
def test_a_users_policy_loss_that_returns_something_else_is_told_what_is_expected(batch, logits, own, name, faults):
    with pytest.raises(ValueError, match=rf"^{name} in .*own\.py: .*" + ".*".join(faults)):
        share_of(PolicyObjective(own(name), 1.0, horizon=3), logits, batch)


def test_every_policy_loss_reads_its_settings(batch, logits):
    """Each key of the configuration arrives: another value gives another loss, where ratios are far from 1."""
    batch = batch.with_(old_log_probs=batch["old_log_probs"] - 3, advantages=torch.tensor([[1.0, -1, 1], [-1, 1, -1]]))

    def loss(mode, **options):
        actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode), **options)
        return share_of(PolicyObjective(actor, 1.0, horizon=3), logits, batch).loss.item()

    read = {
        "vanilla": {"clip_ratio": 0.5, "clip_ratio_high": 0.5, "clip_ratio_c": 2.0},
        "gspo": {"clip_ratio": 0.5, "clip_ratio_high": 0.5},
        "cispo": {"clip_ratio": 0.5, "clip_ratio_high": 0.5},
        "sapo": {"tau_pos": 2.0, "tau_neg": 2.0},
        "geo_mean": {"clip_ratio": 0.5, "clip_ratio_high": 0.5},
    }
    for mode, options in read.items():
        for name, value in options.items():
            assert loss(mode, **{name: value}) != loss(mode), (mode, name)
