"""What models compute in a step: log-probs and values, advantages, and the updates on them.

Shape letters as in `rlx/data/batch.py`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from rlx.algorithms.advantages import ESTIMATORS, token_rewards
from rlx.algorithms.kl import KLController, kl_estimate
from rlx.algorithms.rollout_correction import accepted, importance_weights, not_vetoed
from rlx.cluster.placement import share_ranges
from rlx.config.schema import ActorConfig, AlgorithmConfig, CriticConfig, RolloutCorrectionConfig, rejections
from rlx.config.schema.roles import has_reference, has_reference_model, log_prob_pass, takes_sampled_log_probs
from rlx.data.batch import EXPERTS, SAMPLE_TOKENS, SEQUENCE, Batch, concat, partition, places_of
from rlx.data.seeding import seed_for
from rlx.errors import ExplainedError
from rlx.trainer import step_metrics
from rlx.trainer.environment_rows import joined, with_sample_tokens
from rlx.trainer.run_state import Run
from rlx.trainer.step_metrics import finite_mean, masked_mean

Metrics = dict[str, float]

IN_UPDATE = "in_update"  # a column that is there until the first update has written the old log-probs of its rows


class Learner:
    """Calls the actor, the reference and the critic."""

    def __init__(self, run: Run):
        self._run, self._config, self._workers = run, run.config, run.workers
        reads = ESTIMATORS[run.config.algorithm.adv_estimator].reads
        reference = ("ref", "log_probs") if has_reference_model(run.config) else ("actor", "ref_log_probs")
        # Phase -> role and method that computes a column that the estimator, a reward or a loss reads.
        self._others = {"ref": reference} if has_reference(run.config) else {}
        self._others |= {"values": ("critic", "values")} if "values" in reads else {}
        models = {"actor": run.config.actor_rollout_ref.model, "critic": run.config.critic.model}
        self._least_gain = {role: model.least_gain for role, model in models.items()}

    def log_probs(self, batch: Batch, step: int) -> Batch:
        """Write what the estimator, a reward or a loss reads, and old_log_probs unless the samples have them.

        Rows whose first update will compute them are marked by `in_update`, and have none so far, or NaN.
        """
        if "old_log_probs" not in batch:
            is_first = torch.zeros(len(batch), dtype=torch.bool)
            is_first[self._rows_without_pass(batch, step)] = True
            others = (~is_first).nonzero().flatten().tolist()
            if others:
                with self._run.progress.phase("old_log_prob"):
                    if is_first.any() and self._config.trainer.balance_batch:
                        others = self._balanced("actor", batch, others)
                    batch = written(batch, others, self._asked(batch.rows(others), "actor", "log_probs", EXPERTS))
            if is_first.any():
                batch = batch.with_(in_update=is_first)
        for phase, (role, method) in self._others.items():
            with self._run.progress.phase(phase):
                batch = batch.with_(**self._asked(batch, role, method).tensors)
        return batch

    def _rows_without_pass(self, batch: Batch, step: int) -> list[int]:
        """Return the rows of the first mini-batch if its update can compute their old log-probs, else none."""
        if log_prob_pass(self._config, step).prompts == self._config.data.train_batch_size or self._differs_in_training:
            return []
        rows = next(self._cut("actor", self._config.actor_rollout_ref.actor, batch, step))
        return rows if batch["response_mask"][rows].any() else []  # without a token there is no update

    @cached_property
    def _differs_in_training(self) -> bool:
        return any(self._workers.call("actor", "differs_in_training"))

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Write rewards, advantages, returns if there is a critic, and what corrects the sampler's log-probs; return the metrics.

        All this is computed over conversations; each counts once, even with several rows.
        """
        algorithm = self._config.algorithm
        with self._run.progress.phase("advantages"):
            whole, apart = joined(batch)
            whole, compared = (whole, Metrics()) if IN_UPDATE in batch else self._compared(whole)
            whole, rewarded = add_rewards(whole, algorithm, self._run.kl_controller)
            whole = whole.with_(**ESTIMATORS[algorithm.adv_estimator](whole, algorithm))
            metrics = step_metrics.describe(batch, whole) | compared | rewarded
            if self._run.has_stale_tokens:
                metrics |= step_metrics.staleness(whole, self._run.policy_version)
            return apart(whole), metrics

    def _compared(self, whole: Batch) -> tuple[Batch, Metrics]:
        """Write what corrects the sampler's log-probs; return all metrics that old_log_probs and entropy give.

        The batch has a row for each conversation.
        """
        correction, metrics = self._config.algorithm.rollout_correction, step_metrics.describe_policy(whole)
        if takes_sampled_log_probs(self._config):
            return whole, metrics
        metrics |= step_metrics.mismatch(whole)
        if self._run.has_stale_tokens:
            metrics |= step_metrics.mismatch_by_gap(whole, self._run.policy_version)
        whole, corrected = correct(whole, correction)
        return whole, metrics | corrected

    def update(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Take one optimizer step per mini-batch and epoch: the critic's if there is one, the actor's after the critic's warm-up.

        Return the batch with all old_log_probs; and the mean metrics of each role, with the number of skipped steps, whose metrics
        are not finite and do not enter the means. Beside them metrics that a first update gave, see `log_probs`.
        """
        metrics: Metrics = {}
        due: dict[str, ActorConfig | CriticConfig] = {"critic": self._config.critic} if "values" in batch else {}
        if step > self._config.trainer.critic_warmup:
            due["actor"] = self._config.actor_rollout_ref.actor
        for role, settings in due.items():
            each: list[Metrics] = []
            counted = "loss_mask" if role == "actor" and "loss_mask" in batch else "response_mask"
            batch = with_sample_tokens(batch, counted)
            with self._run.progress.phase(f"update_{role}"):
                for rows in self._mini_batches(role, settings, batch, counted, step):
                    sent = batch.rows(rows).select(*self._columns(role, batch))
                    if role == "actor" and IN_UPDATE in batch:
                        answers = self._workers.call(role, "first_update", batch=sent)
                        each.append(answers[0][0])
                        found = concat([columns for _, columns in answers])
                        whole, apart = joined(written(batch, rows, found).drop(IN_UPDATE))
                        whole, compared = self._compared(whole)
                        batch, metrics = apart(whole), metrics | compared
                    else:
                        is_compared = self._config.actor_rollout_ref.rollout.exact and role == "actor" and not each
                        method = "update_equal" if is_compared else "update"
                        each.append(self._workers.call(role, method, batch=sent)[0])
            metrics |= _joined(role, each)
        return batch, metrics

    def _columns(self, role: str, batch: Batch) -> tuple[str, ...]:
        """Return the columns that a role's loss may read."""
        replays = self._config.actor_rollout_ref.actor.router_replay.mode == "R3"
        of_old = ["rollout_log_probs"] if IN_UPDATE in batch else ["old_log_probs", "rollout_is_weights"]
        of_actor = ["advantages", *of_old, "ref_log_probs", "loss_mask", *([EXPERTS] if replays else [])]
        of_role = {"actor": of_actor, "critic": ["values", "returns"]}[role]
        return (*SEQUENCE, *(name for name in (*of_role, SAMPLE_TOKENS) if name in batch))

    def _cut(self, role: str, settings: ActorConfig | CriticConfig, batch: Batch, step: int) -> Iterator[list[int]]:
        """Yield the rows of each mini-batch of all epochs."""
        assert settings.ppo_mini_batch_size is not None and settings.ppo_epochs is not None
        seed = seed_for(self._run.seed, "mini-batches", role, step) if settings.shuffle else None
        return mini_batches(batch, settings.ppo_mini_batch_size, settings.ppo_epochs, seed)

    def _balanced(self, role: str, batch: Batch, rows: list[int]) -> list[int]:
        order = balanced(batch.rows(rows), self._workers.mesh(role).shares, self._least_gain[role])
        return [rows[row] for row in order]

    def _mini_batches(
        self, role: str, settings: ActorConfig | CriticConfig, batch: Batch, counted: str, step: int
    ) -> Iterator[list[int]]:
        """Yield the rows of mini-batches with a token in the loss, of which the mask is `counted`, and tell of the others.

        These get no step, because weight decay and momentum would still move the weights.
        """
        total, unused = 0, Counter[str]()
        for rows in self._cut(role, settings, batch, step):
            total += 1
            if batch[counted][rows].any():
                yield self._balanced(role, batch, rows) if self._config.trainer.balance_batch else rows
            else:
                is_empty = not batch["response_mask"][rows].any()
                why = "no response has any token in" if is_empty else "rollout_correction rejected every token of"
                unused[why] += 1
        for why, count in unused.items():
            of = f"{count} of {total} mini-batches"
            self._run.progress.notice(f"step {step}: {why} {of}, so they give no optimizer step")

    def sync(self, step: int) -> None:
        """Send the actor's weights to the sampler if the step updated them."""
        if step > self._config.trainer.critic_warmup:
            with self._run.progress.phase("sync"):
                self._run.send_weights(updates=1)

    def account(self, step: int, batch: Batch, updated: Metrics) -> Metrics:
        """Return counters and resource use at the end of a step, and show notices."""
        skipped = sum(updated.get(f"{role}/skipped", 0) for role in ("actor", "critic"))
        self._run.skipped_steps += int(skipped)
        if skipped:
            self._run.progress.notice(
                f"step {step}: {skipped:.0f} optimizer step(s) skipped: the gradient was not finite"
            )
        return {
            "train/skipped_steps": float(self._run.skipped_steps),
            "train/policy_version": float(self._run.policy_version),
            "perf/tokens": float(batch["attention_mask"].sum()),
            **step_metrics.resource_use(self._usage()),
        }

    def memory_of(self, phase: str) -> Metrics:
        """Return the memory before and after a phase that has just ended outside a step."""
        return step_metrics.memory_of(self._usage(), [phase])

    def _usage(self) -> list[dict[str, Any]]:
        usage = self._workers.call("process", "usage")
        self._run.timeline.read([each.pop("readings") for each in usage])
        return usage

    def _asked(self, batch: Batch, role: str, method: str, *optional: str) -> Batch:
        """Return the columns that the role computes from the sequences, and from optional columns."""
        sent = batch.select(*SEQUENCE, *(name for name in optional if name in batch))
        return self._workers.split(role, method, sent)


def _joined(role: str, each: list[Metrics]) -> Metrics:
    """Return one row of the metrics of a role's optimizer steps."""
    if not each:
        return {f"{role}/skipped": 0.0}
    each, measured = step_metrics.split_off(each)
    means = {name: finite_mean([m[name] for m in each]) for name in each[0]}
    means[f"{role}/skipped"] = sum(m[f"{role}/skipped"] for m in each)
    return means | measured


def written(batch: Batch, rows: Sequence[int], found: Batch) -> Batch:
    """Write the columns of `found` into these rows; in a new column the other rows are NaN."""
    columns = {}
    for name, column in found.tensors.items():
        whole = batch[name].clone() if name in batch else column.new_full((len(batch), *column.shape[1:]), math.nan)
        whole[list(rows)] = column
        columns[name] = whole
    return batch.with_(**columns)


def mini_batches(batch: Batch, prompts: int, epochs: int, seed: int | None) -> Iterator[list[int]]:
    """Yield the rows of the batch (with group_id) cut by whole prompts, once per epoch.

    `prompts`, those of a mini-batch, divides the number of prompts in the batch. A seed shuffles the prompts in every epoch.
    """
    members = places_of(batch["group_id"].tolist())
    groups = sorted(members)
    for epoch in range(epochs):
        order = groups
        if seed is not None:
            shuffler = torch.Generator().manual_seed(seed_for(seed, epoch))
            order = [groups[i] for i in torch.randperm(len(groups), generator=shuffler).tolist()]
        for first in range(0, len(order), prompts):
            yield [row for group in order[first : first + prompts] for row in members[group]]


def add_rewards(batch: Batch, algorithm: AlgorithmConfig, controller: KLController) -> tuple[Batch, Metrics]:
    """Write token_rewards and their sum, outcomes: the score, less the controlled KL to the reference if configured.

    The part of the score that an environment gave for turns is on their last tokens, the rest on the row's last token.

    With the KL in the reward, return the mean over samples of its mean per token, and its coefficient, which then adapts.
    """
    mask, scores = batch["response_mask"], batch["scores"]
    turns_BR = batch["turn_rewards"] if "turn_rewards" in batch else torch.zeros_like(scores)[:, None]
    rest = (scores - turns_BR.sum(dim=1, dtype=torch.float64)).to(scores.dtype)
    if not algorithm.use_kl_in_reward:
        return batch.with_(token_rewards=token_rewards(rest, mask) + turns_BR, outcomes=scores), {}
    coef = controller.coef
    kl_BR = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], algorithm.kl_penalty) * mask
    kl = (kl_BR.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean().item()
    outcomes = (scores - coef * kl_BR.sum(dim=1, dtype=torch.float64)).to(scores.dtype)
    controller.update(kl, len(batch))
    batch = batch.with_(token_rewards=token_rewards(rest, mask, kl_BR, coef) + turns_BR, outcomes=outcomes)
    return batch, {"actor/reward_kl": kl, "actor/reward_kl_coef": coef}


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
        how = *correction.weight_bounds, correction.rollout_is_batch_normalize
        weights_BR = importance_weights(*compared, correction.rollout_is, *how)
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


# Rows are dealt to processes so that each takes about the same time, and groups stay together. A group is the rows of one prompt: a
# process that has several of them may compute the prompt once (`model.use_shared_prefix`).

# With this length attention takes as long as everything else: a layer of width d computes 24 d^2 per token, and 2 d L in causal
# attention over L tokens; d is that of a model with about 7B parameters.
QUADRATIC_TOKENS = 12 * 4096
# Groups are parted if that lowers the cost of the dearest process by more than this share.
MOST_UNBALANCE = 0.1


class RowTokens(NamedTuple):
    """Tokens of a row: its prompt and its response, and the group of its prompt."""

    prompt: int
    response: int
    group: int


def balanced(batch: Batch, parts: int, least_gain: float) -> list[int]:
    """Return the rows in an order so that contiguous shares take about the same time; each share keeps the row count of a plain cut.

    A row of L tokens costs L * (1 + L / QUADRATIC_TOKENS). If prompts are shared, a process computes one once for all its rows
    of a group. Then groups stay whole, or are halved as often as it takes to come within `MOST_UNBALANCE` of the best.

    Args:
        batch: with group_id.
        parts: number of processes.
        least_gain: of the model's `ModelConfig`.
    """
    rows = rows_of(batch, least_gain)
    room = [len(share) for share in share_ranges(len(rows), parts)]
    deals = [deal(rows, chunks, room) for chunks in _chunks(rows)]
    dearest = [max(cost([rows[i] for i in share]) for share in shares) for shares in deals]
    # Deals come from whole groups to single rows.
    chosen = next(i for i, each in enumerate(dearest) if each <= min(dearest) * (1 + MOST_UNBALANCE))
    return [row for share in deals[chosen] for row in share]


def rows_of(batch: Batch, least_gain: float) -> list[RowTokens]:
    """Return the rows, each in a group of its own if shared prompts save too small a part of the tokens."""
    mask, width = batch["attention_mask"], batch.response_length
    prompts, responses = (x.sum(dim=1).tolist() for x in (mask[:, :-width], mask[:, -width:]))
    rows = [RowTokens(*each) for each in zip(prompts, responses, batch["group_id"].tolist(), strict=True)]
    saved = sum(prompts) - sum({row.group: row.prompt for row in rows}.values())
    if saved > least_gain * (sum(prompts) + sum(responses)):
        return rows
    return [row._replace(group=number) for number, row in enumerate(rows)]


def cost(rows: Sequence[RowTokens]) -> float:
    """Return the cost of the rows of one process, with one prompt for each group."""
    prompts = {row.group: row.prompt for row in rows}
    whole = sum(tokens * (1 + tokens / QUADRATIC_TOKENS) for tokens in prompts.values())
    # Response tokens attend to the prompt and to half of the response on average.
    return whole + sum(row.response * (1 + (2 * row.prompt + row.response) / QUADRATIC_TOKENS) for row in rows)


def deal(rows: Sequence[RowTokens], chunks: Sequence[list[int]], room: Sequence[int]) -> list[list[int]]:
    """Return each process's rows: chunks by their costs, then single rows from processes with too many to those with too few."""
    largest = max(map(len, chunks), default=1)
    costs = [cost([rows[i] for i in chunk]) for chunk in chunks]
    of_parts = partition(costs, len(room), list(room) if largest == 1 else None)
    shares = [[row for chunk in part for row in chunks[chunk]] for part in of_parts]
    surplus = [share.pop() for share, most in zip(shares, room, strict=True) for _ in range(len(share) - most)]
    for share, most in zip(shares, room, strict=True):
        while len(share) < most:
            share.append(surplus.pop())
    return shares


def _chunks(rows: Sequence[RowTokens]) -> Iterator[list[list[int]]]:
    """Yield the rows cut into chunks of at most so many of a group: all, half of them, a quarter, and so on to one."""
    members = places_of(row.group for row in rows)
    most = max(map(len, members.values()), default=1)
    while True:
        yield [group[first : first + most] for group in members.values() for first in range(0, len(group), most)]
        if most == 1:
            return
        most = -(-most // 2)


MOST_SKIPPED = 5
"""Steps in a row without any update, after which a run ends: a single batch may overflow, but not one after the other."""


class UpdatesSkipped(ExplainedError, RuntimeError):
    """No update could be taken, so the run trains nothing."""


class SkippedUpdates:
    """Ends a run whose gradients are not finite. The trainer calls `judge` after each step and `end` after the last one."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._has_updated: set[str] = set()

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the steps in a row in which a role skipped all its updates.

        Raises UpdatesSkipped: there are MOST_SKIPPED of them.
        """
        for role in ("actor", "critic"):
            norm = metrics.get(f"{role}/grad_norm")  # of the updates that were taken
            if norm is None:
                continue
            if math.isfinite(norm):
                self._has_updated.add(role)
                self._in_a_row[role] = 0
                continue
            self._in_a_row[role] = self._in_a_row.get(role, 0) + 1
            if self._in_a_row[role] == MOST_SKIPPED:
                raise self._error(role, f"all updates of steps {step - MOST_SKIPPED + 1} to {step} were skipped")

    def end(self) -> None:
        """Raise UpdatesSkipped if a role took no update in this run because each was skipped."""
        for role, count in self._in_a_row.items():
            if count and role not in self._has_updated:
                raise self._error(role, f"all updates of the run ({count} steps) were skipped")

    def _error(self, role: str, what: str) -> UpdatesSkipped:
        key = "critic" if role == "critic" else "actor_rollout_ref.actor"
        return UpdatesSkipped(
            f"{role}: {what}, because the gradient's norm was NaN or infinite, so nothing was trained; look for values that are not "
            f"finite in metrics.jsonl, lower {key}.optim.lr, or set {key}.fsdp_config.model_dtype=fp32, then begin at an earlier "
            "checkpoint"
        )
