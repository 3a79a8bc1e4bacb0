"""The driver's arithmetic: seeds, shares, mini-batches, advantages, metrics of a step.

Pure functions from batches to batches that call no worker. Shape letters as in `rlx/data/batch.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlx.algorithms.advantages import ESTIMATORS, token_rewards
from rlx.algorithms.kl import KLController, kl_estimate
from rlx.config.schema import AlgorithmConfig
from rlx.data.batch import Batch
from rlx.data.seeding import seed_for
from rlx.rollout.protocol import joined_loads
from rlx.trainer.forked_conversations import joined, last_rows


def spread(prompts: Batch, samples: int, run_seed: int, purpose: str, step: int, first: int = 0) -> Batch:
    """Repeat each prompt `samples` times in a row, with group_id, seed and info sample.

    A seed is a hash of run_seed, purpose, step and the indices of prompt and sample. `first` is the index of the first prompt,
    if the step has drawn others before.
    """
    index = [p for p in range(len(prompts)) for _ in range(samples)]
    seeds = [seed_for(run_seed, purpose, step, first + p, s) for p in range(len(prompts)) for s in range(samples)]
    info = {"sample": [*range(samples)] * len(prompts)}
    return prompts.rows(index).with_(info, group_id=torch.tensor(index) + first, seed=torch.tensor(seeds))


def mini_batches(batch: Batch, prompts: int, epochs: int, seed: int | None) -> Iterator[Batch]:
    """Yield the batch (with group_id) cut by whole prompts, once per epoch.

    `prompts`, those of a mini-batch, divides the number of prompts in the batch. A seed shuffles the prompts in every epoch.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch["group_id"].tolist()):
        members.setdefault(group, []).append(row)
    groups = sorted(members)
    for epoch in range(epochs):
        order = groups
        if seed is not None:
            shuffler = torch.Generator().manual_seed(seed_for(seed, epoch))
            order = [groups[i] for i in torch.randperm(len(groups), generator=shuffler).tolist()]
        for first in range(0, len(order), prompts):
            yield batch.rows([row for group in order[first : first + prompts] for row in members[group]])


def add_rewards(batch: Batch, algorithm: AlgorithmConfig, kl_coef: float) -> tuple[Batch, float | None]:
    """Write token_rewards and their sum, outcomes: the score, less `kl_coef` times the KL to the reference if configured.

    The part of the score that an environment gave for turns is on their last tokens, the rest on the row's last token.

    Return also the mean over samples of the per-token mean KL, or None if KL is not in the reward.
    """
    mask, scores = batch["response_mask"], batch["scores"]
    turns_BR = batch["turn_rewards"] if "turn_rewards" in batch else torch.zeros_like(scores)[:, None]
    rest = (scores - turns_BR.sum(dim=1, dtype=torch.float64)).to(scores.dtype)
    if not algorithm.use_kl_in_reward:
        return batch.with_(token_rewards=token_rewards(rest, mask) + turns_BR, outcomes=scores), None
    kl_BR = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], algorithm.kl_penalty) * mask
    kl = (kl_BR.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean().item()
    outcomes = (scores - kl_coef * kl_BR.sum(dim=1, dtype=torch.float64)).to(scores.dtype)
    return batch.with_(token_rewards=token_rewards(rest, mask, kl_BR, kl_coef) + turns_BR, outcomes=outcomes), kl


def add_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Write advantages, and returns if there is a critic."""
    return batch.with_(**ESTIMATORS[algorithm.adv_estimator](batch, algorithm))


def rewarded(batch: Batch, algorithm: AlgorithmConfig, kl_controller: KLController) -> tuple[Batch, dict[str, float]]:
    """Write rewards and advantages; with the KL in the reward return it and its coefficient, which then adapts."""
    coef = kl_controller.coef
    whole, kl = add_rewards(batch, algorithm, coef)
    whole = add_advantages(whole, algorithm)
    if kl is None:
        return whole, {}
    kl_controller.update(kl, len(whole))
    return whole, {"actor/reward_kl": kl, "actor/reward_kl_coef": coef}


def zero_advantage_share(batch: Batch) -> float:
    """Return the share of prompts that teach nothing: no token of their samples has an advantage."""
    groups, of_row = batch["group_id"].unique(return_inverse=True)
    taught = of_row[(batch["advantages"] != 0).any(dim=1)].unique()
    return 1 - len(taught) / len(groups)


def describe(batch: Batch) -> dict[str, float]:
    """Return the metrics of a finished batch, in which the rows of a conversation count as one sample."""
    is_full = last_rows(batch)["attention_mask"][:, -1]
    batch = joined(batch)
    mask = batch["response_mask"]
    lengths = mask.sum(dim=1).float()
    numbers = {
        "reward/mean": batch["scores"].mean().item(),
        "reward/std": batch["scores"].std(correction=0).item(),
        "reward/max": batch["scores"].max().item(),
        "reward/min": batch["scores"].min().item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": is_full.float().mean().item(),
        "train/zero_advantage_share": zero_advantage_share(batch),
        "advantages/abs_mean": masked_mean(batch["advantages"].abs(), mask),
    }
    if "entropy" in batch:
        numbers["actor/entropy"] = masked_mean(batch["entropy"], mask)
    if "ref_log_probs" in batch:
        k3 = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], "k3")
        numbers["actor/kl_ref"] = masked_mean(k3, mask)
    if "values" in batch:
        numbers["critic/values_mean"] = masked_mean(batch["values"], mask)
        left, total = (masked_variance(x, mask) for x in (batch["returns"] - batch["values"], batch["returns"]))
        numbers["critic/explained_variance"] = 1 - left / total if total > 0 else math.nan
    return numbers


def resource_use(usage: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum bytes, and average times and rates, over the processes, whose figures `Worker.usage` names.

    Return perf/offload/<role>/<figure> for roles that offload, perf/offloaded_mb and perf/stall_ms of all roles together, and
    perf/peak_memory_gb of the process with the highest peak.
    """
    found: dict[str, float] = {}
    for name in usage[0]:
        if "/" in name and not name.startswith(("memory/", "load/")):
            total = sum(each[name] for each in usage)
            found[f"perf/offload/{name}"] = total if name.endswith("_bytes") else total / len(usage)
    moved, stalled = (
        sum(value for name, value in found.items() if name.endswith(end)) for end in ("/offloaded_bytes", "/stall_ms")
    )
    peak = max(each["peak_memory_gb"] for each in usage)
    return {**found, "perf/offloaded_mb": moved / 1e6, "perf/stall_ms": stalled, "perf/peak_memory_gb": peak}


def sampler_load(usage: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return perf/rollout/<figure> of all samplers together, from `Worker.usage` of each process; {} if none had a request."""
    loads = [{name[5:]: value for name, value in each.items() if name.startswith("load/")} for each in usage]
    return {f"perf/rollout/{name}": value for name, value in joined_loads(loads).items()}


def rates(metrics: Mapping[str, float], timings: Mapping[str, float]) -> dict[str, float]:
    """Return tokens a second and the share of stalls of a step, without its validation and checkpoint."""
    outside = sum(timings.get(f"timing_s/{phase}", 0.0) for phase in ("validate", "checkpoint"))
    seconds = timings["timing_s/step"] - outside
    return {
        "perf/tokens_per_second": metrics["perf/tokens"] / seconds,
        "perf/stall_share": metrics["perf/stall_ms"] / 1e3 / seconds,
    }


def finite_mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def masked_mean(x_BR: Tensor, mask_BR: Tensor) -> float:
    """Return the mean over the tokens of the mask; 0 if it is empty."""
    return ((x_BR * mask_BR).sum() / mask_BR.sum().clamp(min=1)).item()


def masked_variance(x_BR: Tensor, mask_BR: Tensor) -> float:
    """Return the biased variance over the tokens of the mask."""
    return masked_mean((x_BR - masked_mean(x_BR, mask_BR)) ** 2, mask_BR)
