"""The losses that an update minimises. Shape letters: B rows, R response tokens.

An objective turns the model's outputs on one micro-batch into a share of the mini-batch's loss and metrics. It divides the share
by the totals of the whole mini-batch, so the engine adds shares over micro-batches and processes.
"""

from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.algorithms.kl import kl_estimate
from rlx.algorithms.losses import POLICY_LOSSES, LossSettings, denominator, token_weights, value_loss
from rlx.algorithms.rollout_correction import importance_weights, mismatch_sums
from rlx.config.schema import ActorConfig, CriticConfig, PolicyLossConfig, RolloutCorrectionConfig
from rlx.data.batch import EXPERTS, SAMPLE_TOKENS, Batch
from rlx.engine.forward import Distribution
from rlx.user_code import POLICY_LOSS, load_callable

NO_CORRECTION = RolloutCorrectionConfig()


class Totals(NamedTuple):
    """Counts over the whole mini-batch on all processes, each at least 1."""

    denominator: float
    tokens: float


class Share(NamedTuple):
    """One micro-batch's share of the mini-batch's loss (scalar with its graph) and of its metrics (scalars without).

    The engine sums metrics over the shares, and takes the largest of each of the `maxima`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    maxima: Mapping[str, Tensor] = MappingProxyType({})

    def plus(self, name: str, loss: Tensor | None, weight: float) -> "Share":
        """Return the share with another loss, weighted, which is also a metric, unweighted; the same share without one."""
        if loss is None:
            return self
        return self._replace(loss=self.loss + weight * loss, metrics={**self.metrics, name: loss.detach()})


class Objective:
    """The interface between the engine and a loss."""

    columns: tuple[str, ...] = ()  # read from the batch in addition to the sequences
    distribution: Distribution | None = None  # how to read a language model's output; None for a value model
    loss_agg_mode = "token-mean"  # how the losses of tokens become one

    def mask(self, batch: Batch) -> Tensor:
        return batch["response_mask"]

    def share(self, outputs: dict[str, Tensor], batch: Batch, totals: Totals) -> Share:
        """Return this micro-batch's share of loss and metrics; `outputs` are those of `Forward`, (B, R) each."""
        raise NotImplementedError

    def weights(self, batch: Batch, horizon: int, dtype: torch.dtype, totals: Totals) -> Tensor:
        tokens_B = batch.tensors.get(SAMPLE_TOKENS)
        return token_weights(self.mask(batch), self.loss_agg_mode, horizon, dtype, tokens_B) / totals.denominator


# Every process calls these two functions.


def totals_of(batch: Batch, objective: Objective, copies: int, device: torch.device) -> Totals:
    """Return the counts of a mini-batch that the processes share, and `copies` processes the same one."""
    mask_BR = objective.mask(batch)
    samples = denominator(mask_BR, objective.loss_agg_mode, batch.tensors.get(SAMPLE_TOKENS))
    counts = torch.stack([samples.double(), mask_BR.sum().double()]).to(device)
    dist.all_reduce(counts)
    return Totals(*(counts / copies).round().clamp(min=1).tolist())  # shares of samples add up to whole numbers


def over_processes(each: dict[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
    """Return each scalar reduced over the processes, which have the same names. Waits for the device."""
    if not each:
        return {}
    names = sorted(each)
    figures = torch.stack([each[name] for name in names])
    dist.all_reduce(figures, op=op)
    return dict(zip(names, figures.tolist(), strict=True))


def _per_token(stats: dict[str, Tensor], mask_BR: Tensor, tokens: float) -> dict[str, Tensor]:
    """Return each statistic's share of its mean over the mini-batch's response tokens."""
    return {name: (x.detach() * mask_BR).sum() / tokens for name, x in stats.items()}


def _checked(answer: Any, mask_BR: Tensor, config: PolicyLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of a policy loss, which a user may have written.

    Raises ValueError if it is not one loss per token with statistics per token.
    """
    shape, where = tuple(mask_BR.shape), f"{config.name} in {config.path}"
    parts = answer if isinstance(answer, tuple | list) else (answer,)
    if not (len(parts) == 2 and isinstance(parts[0], Tensor) and isinstance(parts[1], dict)):
        got = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            f"{where}: returned {got}, expected (loss, statistics): a tensor and a dict of tensors, all of shape {shape}"
        )
    loss_BR, stats = parts
    faults = []
    if loss_BR.shape != shape:
        faults.append(
            f"got a loss of shape {tuple(loss_BR.shape)}, expected {shape}: one number per token, which rlx averages "
            "according to actor.loss_agg_mode"
        )
    for name, x in stats.items():
        if not isinstance(x, Tensor) or x.shape != shape:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            faults.append(
                f"got a statistic {name!r} of {got}, expected a tensor of shape {shape}: one number per token, whose mean "
                f"over the mini-batch rlx logs as actor/{name}"
            )
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults)}")
    return loss_BR, stats


class PolicyObjective(Objective):
    """A policy loss, an entropy bonus and the KL to the reference, weighted as configured.

    With rollout_is the importance weight multiplies each token's policy loss alone: the other terms are no averages over the
    sampled tokens' probabilities. A rejected token counts in no term and no denominator: the loss is the mean over the rest.
    The driver computes weights and rejections. `horizon` is the longest response allowed [tokens].

    Metrics: pg_loss, ppo_kl (mean of old - new log-prob), the policy loss's own statistics; with use_kl_loss also kl_loss,
    with entropy_coeff also entropy_loss (both unweighted). With bypass_mode the old log-probs are the sampler's. This pass is
    then the first to measure entropy and, as `mismatch/...`, the sums of `mismatch_sums`. Raises UserCodeError.
    """

    def __init__(
        self,
        actor: ActorConfig,
        temperature: float,
        horizon: int,
        correction: RolloutCorrectionConfig = NO_CORRECTION,
    ):
        self.actor, self.horizon, self.correction = actor, horizon, correction
        self.loss_agg_mode, self.is_first = actor.loss_agg_mode, False
        # What gave old_log_probs has also measured the entropy.
        has_bonus = actor.entropy_coeff != 0
        self.distribution = Distribution(temperature, correction.bypass_mode or has_bonus, has_bonus)
        own, self.policy_loss = actor.policy_loss, POLICY_LOSSES[actor.policy_loss.loss_mode]
        if own.path is not None:
            self.policy_loss = load_callable(own.path, own.name, POLICY_LOSS)
        self.settings = LossSettings(
            clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            clip_c=actor.clip_ratio_c,
            tau_pos=actor.tau_pos,
            tau_neg=actor.tau_neg,
        )
        optional = {
            "ref_log_probs": actor.use_kl_loss,
            "rollout_is_weights": correction.rollout_is is not None,
            "loss_mask": correction.rejects,
            EXPERTS: actor.router_replay.mode == "R3",
        }
        self.columns = ("old_log_probs", "advantages", *(name for name, read in optional.items() if read))

    def of_first_update(self) -> "PolicyObjective":
        """Return this objective for an update with the weights that sampled.

        The update's own forward gives the old log-probs, by which it weighs tokens if rollout_is is set, and measures the entropy.
        """
        first, instead = copy(self), {"old_log_probs": (), "rollout_is_weights": ("rollout_log_probs",)}
        first.is_first, first.distribution = True, self.distribution._replace(with_entropy=True)
        first.columns = tuple(name for column in self.columns for name in instead.get(column, (column,)))
        return first

    def mask(self, batch: Batch) -> Tensor:
        return batch["loss_mask" if self.correction.rejects else "response_mask"]

    def share(self, outputs: dict[str, Tensor], batch: Batch, totals: Totals) -> Share:
        actor, mask_BR, bypass = self.actor, self.mask(batch), self.correction.bypass_mode
        log_probs, entropy = outputs["log_probs"], outputs.get("entropy")
        weights = self.weights(batch, self.horizon, log_probs.dtype, totals)
        # A copy, because a user's loss may write to it.
        old_log_probs = log_probs.detach().clone() if self.is_first else batch["old_log_probs"]
        answer = self.policy_loss(log_probs, old_log_probs, batch["advantages"], mask_BR, self.settings)
        loss_BR, stats = _checked(answer, mask_BR, actor.policy_loss)
        if (level := self.correction.rollout_is) is not None:
            if self.is_first:
                compared = log_probs, batch["rollout_log_probs"], batch["response_mask"]
                loss_BR = loss_BR * importance_weights(*compared, level, *self.correction.weight_bounds, False)
            else:
                loss_BR = loss_BR * batch["rollout_is_weights"]
        loss = (weights * loss_BR).sum()
        metrics = {"pg_loss": loss.detach()}
        if actor.use_kl_loss:
            kl = (weights * kl_estimate(log_probs, batch["ref_log_probs"], actor.kl_loss_type)).sum()
            loss = loss + actor.kl_loss_coef * kl
            metrics["kl_loss"] = kl.detach()
        if entropy is not None and actor.entropy_coeff != 0:
            bonus = (weights * entropy).sum()
            loss = loss - actor.entropy_coeff * bonus
            metrics["entropy_loss"] = bonus.detach()
        figures = {**stats, "ppo_kl": old_log_probs - log_probs}
        maxima = {}
        if bypass:
            figures["entropy"] = entropy
            sums, maxima["mismatch/largest"] = mismatch_sums(log_probs, old_log_probs, mask_BR)
            metrics |= {f"mismatch/{name}": total for name, total in sums.items()}
        return Share(loss, _per_token(figures, mask_BR, totals.tokens) | metrics, maxima)


class ValueObjective(Objective):
    """The clipped squared error of the value model.

    Metrics: vf_loss, clip_fraction, vpred_mean (mean value). `horizon` is the longest response allowed [tokens].
    """

    columns = ("values", "returns")

    def __init__(self, critic: CriticConfig, horizon: int):
        assert critic.loss_agg_mode is not None, "null means the actor's, which is set here by then"
        self.loss_agg_mode, self.clip, self.horizon = critic.loss_agg_mode, critic.cliprange_value, horizon

    def share(self, outputs: dict[str, Tensor], batch: Batch, totals: Totals) -> Share:
        mask_BR, values = batch["response_mask"], outputs["values"]
        weights = self.weights(batch, self.horizon, values.dtype, totals)
        loss_BR, stats = value_loss(values, batch["values"], batch["returns"], self.clip)
        loss = (weights * loss_BR).sum()
        figures = {**stats, "vpred_mean": values}
        return Share(loss, {"vf_loss": loss.detach()} | _per_token(figures, mask_BR, totals.tokens))
