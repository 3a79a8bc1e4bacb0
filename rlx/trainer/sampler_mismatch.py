"""Measure the mismatch between the sampler's and the trainer's log-probs in a batch, and correct it if configured.

Pure functions of the driver. Shape letters as in `rlx/data/batch.py`.
"""

from torch import Tensor

from rlx.algorithms.rollout_correction import (
    accepted,
    importance_weights,
    mismatch_figures,
    mismatch_sums,
    not_vetoed,
)
from rlx.config.check.rules_correction import rejections
from rlx.config.schema import RolloutCorrectionConfig
from rlx.config.schema.keys import read_bounds
from rlx.data.batch import Batch
from rlx.trainer.environment_rows import masks_by_turn
from rlx.trainer.steps import masked_mean

Metrics = dict[str, float]

LOSS_COLUMNS = ("rollout_is_weights", "loss_mask")
"""The columns that `correct` may write for the policy's loss."""

MOST_TURNS = 8
"""Turns whose mismatch is measured alone."""

OF_UPDATE = "actor/mismatch/"
DIFFERING = ("differing_experts", "differing_experts_used")


def compare(batch: Batch, correction: RolloutCorrectionConfig) -> tuple[Batch, Metrics]:
    """Return the batch with the columns that correct the mismatch, if configured, and the figures of both."""
    batch, corrected = correct(batch, correction)
    return batch, measure(batch) | corrected


def measure(batch: Batch) -> Metrics:
    """Compare both policies' log-probs and experts, and return mismatch/... of those that the sampler returned."""
    experts = _named({name: masked_mean(batch[name], batch["response_mask"]) for name in DIFFERING if name in batch})
    if "rollout_log_probs" not in batch:
        return experts
    sums, largest = mismatch_sums(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
    return experts | _named(_figures(sums, largest)) | _by_turn(batch)


def _by_turn(batch: Batch) -> Metrics:
    """Return the figures of each turn alone, as turn_<number>/..., if there are several."""
    metrics: Metrics = {}
    compared = batch["old_log_probs"], batch["rollout_log_probs"]
    for turn, mask_BR in enumerate(masks_by_turn(batch, MOST_TURNS), start=1):
        figures = _figures(*mismatch_sums(*compared, mask_BR))
        metrics |= _named({f"turn_{turn}/{name}": x for name, x in figures.items()})
    return metrics


def _figures(sums: dict[str, Tensor], largest: Tensor) -> Metrics:
    return mismatch_figures({name: total.item() for name, total in sums.items()}, largest.item())


def split_off(updates: list[Metrics]) -> tuple[list[Metrics], Metrics]:
    """Separate the mismatch that updates with bypass_mode measured from their other metrics.

    Return the other metrics, and mismatch/... of the first of the batch's optimizer steps. Only that step ran with the weights
    that the sampler had, and it saw its own mini-batch.
    """
    first = {name.removeprefix(OF_UPDATE): x for name, x in updates[0].items() if name.startswith(OF_UPDATE)}
    rest = [{name: x for name, x in each.items() if not name.startswith(OF_UPDATE)} for each in updates]
    return rest, _named(mismatch_figures(first, first["largest"])) if first else {}


def correct(batch: Batch, correction: RolloutCorrectionConfig) -> tuple[Batch, Metrics]:
    """Write rollout_is_weights and loss_mask if configured.

    Return also correction/...: weight_mean, weight_max, the shares of tokens with weight 0 and of rejected tokens, and the
    share of sequences whose tokens are all rejected.
    """
    if correction.rollout_is is None and not correction.rejects:
        return batch, {}
    mask_BR = batch["response_mask"]
    compared = (batch["old_log_probs"], batch["rollout_log_probs"], mask_BR)
    metrics: Metrics = {}
    if correction.rollout_is is not None:
        bounds = read_bounds(correction.rollout_is_threshold)
        normalize = correction.rollout_is_batch_normalize
        weights_BR = importance_weights(*compared, correction.rollout_is, *bounds, normalize)
        batch = batch.with_(rollout_is_weights=weights_BR)
        metrics |= {
            "correction/weight_mean": masked_mean(weights_BR, mask_BR),
            "correction/weight_max": weights_BR.max().item(),
            "correction/weight_zero_share": masked_mean(weights_BR == 0, mask_BR),
        }
    if correction.rejects:
        left_BR = mask_BR
        for criterion, bounds in rejections(correction):
            left_BR = left_BR & accepted(*compared, criterion, *bounds)
        if correction.rollout_token_veto_threshold is not None:
            left_BR = left_BR & not_vetoed(*compared, correction.rollout_token_veto_threshold)
        batch = batch.with_(loss_mask=left_BR)
        metrics |= {
            "correction/rejected_token_share": masked_mean(~left_BR, mask_BR),
            "correction/rejected_sequence_share": masked_mean(~left_BR.any(dim=1), mask_BR.any(dim=1)),
        }
    return batch, metrics


def _named(figures: Metrics) -> Metrics:
    return {f"mismatch/{name}": x for name, x in figures.items()}
