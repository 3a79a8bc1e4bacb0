import pytest
import torch

from rlx.config.schema import ActorConfig, CriticConfig
from rlx.data.batch import Batch
from rlx.engine.objectives import PolicyObjective, Totals, ValueObjective
from rlx.models.log_probs import token_log_probs

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


def test_metrics_of_the_policy_are_parts_of_means_over_the_mini_batch(batch, logits):
    loss, metrics, _ = PolicyObjective(ActorConfig(), 1.0, horizon=3).share(logits, batch, TOTALS)
    mask = batch["response_mask"]
    log_probs, _ = token_log_probs(logits, batch.responses(), 1.0, False)
    assert metrics["ppo_kl"] == pytest.approx(((batch["old_log_probs"] - log_probs)[mask].sum() / 8).item(), rel=1e-5)
    assert metrics["pg_loss"] == loss.detach()
    assert not any(figure.requires_grad for figure in metrics.values())
    assert set(metrics) == {"pg_loss", "ppo_kl", "clip_fraction", "clip_fraction_lower"}


def test_kl_and_entropy_enter_as_weighed(batch, logits):
    plain, _, _ = PolicyObjective(ActorConfig(), 1.0, horizon=3).share(logits, batch, TOTALS)
    actor = ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.25)
    objective = PolicyObjective(actor, 1.0, horizon=3)
    loss, metrics, _ = objective.share(logits, batch, TOTALS)
    assert objective.columns == ("old_log_probs", "advantages", "ref_log_probs")
    expected = plain + 0.5 * metrics["kl_loss"] - 0.25 * metrics["entropy_loss"]
    torch.testing.assert_close(loss, expected)


def test_each_side_of_the_clip_range_can_be_set(batch, logits):
    """Ratios are 1.1 where the advantage is positive and 0.9 where it is negative: within 0.2, beyond 0."""
    log_probs, _ = token_log_probs(logits, batch.responses(), 1.0, False)
    ratio = 1 + 0.1 * batch["advantages"].sign()
    batch = batch.with_(old_log_probs=log_probs.detach() - ratio.log())

    def clipped(**options):
        metrics = PolicyObjective(ActorConfig(**options), 1.0, horizon=3).share(logits, batch, TOTALS).metrics
        return metrics["clip_fraction"].item() * TOTALS.tokens

    upwards = (batch["advantages"] > 0)[batch["response_mask"]].sum().item()
    assert 0 < upwards < 5
    assert clipped() == 0 and clipped(clip_ratio=0.0) == 5
    assert clipped(clip_ratio_high=0.0) == upwards and clipped(clip_ratio_low=0.0) == 5 - upwards


def test_a_micro_batch_without_response_tokens_adds_nothing(batch, logits):
    empty = batch.with_(response_mask=torch.zeros(2, 3, dtype=torch.bool))
    loss, metrics, _ = PolicyObjective(ActorConfig(entropy_coeff=0.1), 1.0, horizon=3).share(logits, empty, TOTALS)
    loss.backward()
    assert loss == 0 and not logits.grad.any() and not any(metrics.values())


def test_the_critics_aggregation_must_be_resolved():
    with pytest.raises(ValueError, match="loss_agg_mode"):
        ValueObjective(CriticConfig(), horizon=3)
