"""The driver's own arithmetic: seeds, shares, mini-batches, advantages, numbers of a step.

Pure functions from batches to batches; no worker is called here. Shape letters as in `rlx/data/batch.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlx.algorithms.advantages import ESTIMATORS, token_rewards
from rlx.algorithms.kl import kl_estimate
from rlx.algorithms.partition import partition
from rlx.cluster.mesh import share_ranges
from rlx.config.schema import AlgorithmConfig
from rlx.data.batch import Batch
from rlx.data.seeding import seed_for

# Where attention takes as long as all else: a layer of width d computes 24 d^2 per token and 2 d L in causal attention over
# L tokens; d is that of a model with about 7B parameters.
QUADRATIC_TOKENS = 12 * 4096


def spread(prompts: Batch, samples: int, run_seed: int, purpose: str, step: int, first: int = 0) -> Batch:
    """Each prompt `samples` times in a row, with its group and the seed of each sample.

    Args:
        prompts: one row per prompt.
        samples: responses per prompt.
        run_seed, purpose, step: what the sampling seeds are hashed from, beside the prompt's place and the sample's.
        first: place of the first prompt, where the step has drawn others before.

    Returns:
        A batch of len(prompts) * samples rows with group_id and seed written.
    """
    index = [p for p in range(len(prompts)) for _ in range(samples)]
    seeds = [seed_for(run_seed, purpose, step, first + p, s) for p in range(len(prompts)) for s in range(samples)]
    return prompts.rows(index).with_(group_id=torch.tensor(index) + first, seed=torch.tensor(seeds))


def balance(batch: Batch, parts: int) -> Batch:
    """Rows reordered so that contiguous shares take about the same time, with the row counts that a plain cut gives them.

    A row of L tokens counts L * (1 + L / QUADRATIC_TOKENS).
    """
    costs = [tokens * (1 + tokens / QUADRATIC_TOKENS) for tokens in batch.token_counts()]
    shares = partition(costs, parts, [len(share) for share in share_ranges(len(batch), parts)])
    return batch.rows([row for share in shares for row in share])


def mini_batches(batch: Batch, prompts: int, epochs: int, seed: int | None) -> Iterator[Batch]:
    """The batch, cut by whole prompts, once per epoch.

    Args:
        batch: with group_id.
        prompts: prompts per mini-batch; divides the number of prompts in the batch.
        epochs: passes over the batch.
        seed: shuffles the prompts of every epoch; None keeps their order.
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
    """Writes token_rewards: the score, less `kl_coef` times the KL to the reference where asked.

    Returns:
        The batch, and the mean over samples of the per-token mean KL, or None where KL is not in the reward.
    """
    mask = batch["response_mask"]
    if not algorithm.use_kl_in_reward:
        return batch.with_(token_rewards=token_rewards(batch["scores"], mask)), None
    kl_BR = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], algorithm.kl_penalty) * mask
    kl = (kl_BR.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean().item()
    return batch.with_(token_rewards=token_rewards(batch["scores"], mask, kl_BR, kl_coef)), kl


def add_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Writes advantages, and returns where there is a critic."""
    return batch.with_(**ESTIMATORS[algorithm.adv_estimator](batch, algorithm))


def zero_advantage_share(batch: Batch) -> float:
    """Share of prompts that teach nothing: no token of any of their samples has an advantage."""
    groups, of_row = batch["group_id"].unique(return_inverse=True)
    taught = of_row[(batch["advantages"] != 0).any(dim=1)].unique()
    return 1 - len(taught) / len(groups)


def describe(batch: Batch) -> dict[str, float]:
    """Numbers of a finished batch for the step table and the trackers."""
    mask = batch["response_mask"]
    lengths = mask.sum(dim=1).float()
    numbers = {
        "reward/mean": batch["scores"].mean().item(),
        "reward/std": batch["scores"].std(correction=0).item(),
        "reward/max": batch["scores"].max().item(),
        "reward/min": batch["scores"].min().item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": (lengths == mask.shape[1]).float().mean().item(),
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
    """What a step took, from what each process took: bytes are summed, times and rates averaged over the processes.

    Args:
        usage: of each process, as `Worker.usage` names it.

    Returns:
        perf/offload/<role>/<figure> where a role offloads; perf/offloaded_mb and perf/stall_ms, of all roles together;
        perf/peak_memory_gb, of the process that took most.
    """
    found: dict[str, float] = {}
    for name in usage[0]:
        if "/" in name and not name.startswith("memory/"):
            total = sum(each[name] for each in usage)
            found[f"perf/offload/{name}"] = total if name.endswith("_bytes") else total / len(usage)
    moved, stalled = (
        sum(value for name, value in found.items() if name.endswith(end)) for end in ("/offloaded_bytes", "/stall_ms")
    )
    peak = max(each["peak_memory_gb"] for each in usage)
    return {**found, "perf/offloaded_mb": moved / 1e6, "perf/stall_ms": stalled, "perf/peak_memory_gb": peak}


def finite_mean(values: Sequence[float]) -> float:
    """Mean of the finite ones among the values; NaN where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def masked_mean(x_BR: Tensor, mask_BR: Tensor) -> float:
    """Mean over the tokens of the mask; 0 where there are none."""
    return ((x_BR * mask_BR).sum() / mask_BR.sum().clamp(min=1)).item()


def masked_variance(x_BR: Tensor, mask_BR: Tensor) -> float:
    """Biased variance over the tokens of the mask."""
    return masked_mean((x_BR - masked_mean(x_BR, mask_BR)) ** 2, mask_BR)
