"""The metrics of a step: of its batch, of the sampler's mismatch, and of what the processes used. Pure functions.

Shape letters as in `rlx/data/batch.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from rlx.algorithms.advantages import turn_index
from rlx.algorithms.kl import kl_estimate
from rlx.algorithms.rollout_correction import mismatch_figures, mismatch_sums
from rlx.data.batch import Batch
from rlx.rollout.protocol import joined_loads
from rlx.trainer import environment_rows
from rlx.trainer.environment_rows import last_rows
from rlx.trainer.progress import PHASES

Metrics = dict[str, float]
MOST_TURNS = 8
"""Turns whose mismatch is measured alone."""
OF_UPDATE = "actor/mismatch/"
DIFFERING = ("differing_experts", "differing_experts_used")
OF_STEP = tuple(name for name in PHASES if name not in ("validate", "checkpoint"))
MEMORY_FIGURES = ("gb", "allocated_gb")


def memory_of(usage: Sequence[Mapping[str, float]], phases: Iterable[str] = OF_STEP) -> dict[str, float]:
    """Return the memory in use before and after phases, on the process where it was largest.

    Args:
        usage: of each process, as `Worker.usage` names it.
        phases: skipped unless the workers recorded calls of them since the last report.

    Returns:
        memory/<phase>_before_gb (the previous role is already offloaded) and memory/<phase>_after_gb [10^9 bytes]: all bytes in
        use on the device on CUDA, the process's resident size on CPU. On CUDA also memory/<phase>_before_allocated_gb and
        _after_allocated_gb, the bytes in torch's tensors, and _peak_allocated_gb, the most of them during the phase.
    """
    found, of = {}, _by_name(usage)
    for phase in phases:
        noted = [call for call in PHASES[phase].calls if f"memory/{call}_after_gb" in of]
        for moment, call in [("before", noted[0]), ("after", noted[-1])] if noted else []:
            for figure in MEMORY_FIGURES:
                name = f"memory/{call}_{moment}_{figure}"
                if name in of:
                    found[f"memory/{phase}_{moment}_{figure}"] = max(of[name])
        peaks = [max(of[name]) for call in noted if (name := f"memory/{call}_peak_allocated_gb") in of]
        if peaks:
            found[f"memory/{phase}_peak_allocated_gb"] = max(peaks)
    return found


def _by_name(usage: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the figures of the processes that have them; those that only sample have others."""
    names = dict.fromkeys(chain(*usage))
    return {name: [each[name] for each in usage if name in each] for name in names}


def zero_advantage_share(batch: Batch) -> float:
    """Return the share of prompts that teach nothing: no token of their samples has an advantage."""
    groups, of_row = batch["group_id"].unique(return_inverse=True)
    taught = of_row[(batch["advantages"] != 0).any(dim=1)].unique()
    return 1 - len(taught) / len(groups)


def describe(rows: Batch, batch: Batch) -> dict[str, float]:
    """Return the metrics of a finished batch: of its rows, and of the samples that `joined` made of them."""
    is_full = last_rows(rows)["attention_mask"][:, -1]
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
    if "values" in batch:
        numbers["critic/values_mean"] = masked_mean(batch["values"], mask)
        left, total = (masked_variance(x, mask) for x in (batch["returns"] - batch["values"], batch["returns"]))
        numbers["critic/explained_variance"] = 1 - left / total if total > 0 else math.nan
    return numbers | environment_rows.describe(rows)


def describe_policy(batch: Batch) -> dict[str, float]:
    """Return the metrics of the policy with the weights that sampled, which `old_log_probs` and `entropy` give."""
    mask, numbers = batch["response_mask"], {}
    if "entropy" in batch:
        numbers["actor/entropy"] = masked_mean(batch["entropy"], mask)
    if "ref_log_probs" in batch:
        k3 = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], "k3")
        numbers["actor/kl_ref"] = masked_mean(k3, mask)
    return numbers


def resource_use(usage: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum bytes, and average times and rates, over the processes, whose figures `Worker.usage` names.

    Return perf/offload/<role>/<figure> for roles that offload; perf/offloaded_mb and perf/stall_ms of all roles together;
    perf/peak_memory_gb of the process with the highest peak; perf/rollout/<figure> of all samplers together, if one had a request;
    and of the largest process memory/<phase>..., see `memory_of`, and memory/host_<user>_gb and host_reserved_gb, offloaded bytes.
    """
    found, of = dict[str, float](), _by_name(usage)
    for name, values in of.items():
        if "/" in name and not name.startswith(("memory/", "load/")):
            found[f"perf/offload/{name}"] = sum(values) if name.endswith("_bytes") else sum(values) / len(values)
    ends = ("/offloaded_bytes", "/stall_ms")
    moved, stalled = (sum(value for name, value in found.items() if name.endswith(end)) for end in ends)
    found |= {"perf/offloaded_mb": moved / 1e6, "perf/stall_ms": stalled}
    found["perf/peak_memory_gb"] = max(each["peak_memory_gb"] for each in usage)
    loads = [{name[5:]: value for name, value in each.items() if name.startswith("load/")} for each in usage]
    found |= {f"perf/rollout/{name}": value for name, value in joined_loads(loads).items()}
    on_host = {name: max(values) for name, values in of.items() if name.startswith("memory/host_")}
    return found | memory_of(usage) | on_host


def rates(metrics: Mapping[str, float], timings: Mapping[str, float]) -> dict[str, float]:
    """Return tokens a second and the share of stalls of a step, without its validation and checkpoint.

    With samplers in processes of their own return also perf/rollout/idle_s, the time in which they waited for training.
    """
    outside = sum(timings.get(f"timing_s/{phase}", 0.0) for phase in ("validate", "checkpoint"))
    seconds = timings["timing_s/step"] - outside
    found = {
        "perf/tokens_per_second": metrics["perf/tokens"] / seconds,
        "perf/stall_share": metrics["perf/stall_ms"] / 1e3 / seconds,
    }
    if "perf/rollout/generate_s" in metrics:
        found["perf/rollout/idle_s"] = max(0.0, seconds - metrics["perf/rollout/generate_s"])
    return found


def finite_mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def masked_mean(x_BR: Tensor, mask_BR: Tensor) -> float:
    """Return the mean over the tokens of the mask; 0 if it is empty."""
    return ((x_BR * mask_BR).sum() / mask_BR.sum().clamp(min=1)).item()


def masked_variance(x_BR: Tensor, mask_BR: Tensor) -> float:
    return masked_mean((x_BR - masked_mean(x_BR, mask_BR)) ** 2, mask_BR)


def staleness(batch: Batch, version: int) -> Metrics:
    """Return how many updates behind the weights were that sampled the tokens, on average and at most, and the share of each gap."""
    mask = batch["response_mask"]
    gaps_N = version - batch["policy_versions"][mask]
    shares = gaps_N.bincount() / max(1, len(gaps_N))
    found = {f"staleness/gap_{gap}_share": share for gap, share in enumerate(shares.tolist())}
    return found | {
        "staleness/mean": masked_mean(version - batch["policy_versions"], mask),
        "staleness/max": float(max(0, len(shares) - 1)),
    }


def mismatch(batch: Batch) -> Metrics:
    """Compare both policies' log-probs and experts, and return mismatch/... of those that the sampler returned."""
    experts = _named({name: masked_mean(batch[name], batch["response_mask"]) for name in DIFFERING if name in batch})
    if "rollout_log_probs" not in batch:
        return experts
    sums, largest = mismatch_sums(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
    return experts | _named(_figures(sums, largest)) | _by_turn(batch)


def mismatch_by_gap(batch: Batch, version: int) -> Metrics:
    """Return mismatch/gap_<number>/..., by how many updates behind `version` the sampler was; gap 0 is of numerics alone."""
    mask, gap_BR = batch["response_mask"], version - batch["policy_versions"]
    return _of_parts(batch, {f"gap_{gap}": mask & (gap_BR == gap) for gap in gap_BR[mask].unique().tolist()})


def _by_turn(batch: Batch) -> Metrics:
    """Return the figures of each turn alone, as turn_<number>/..., if there are several."""
    index_BR = turn_index(batch["response_mask"])
    turns = int(index_BR.max()) + 1 if index_BR.numel() else 0
    shown = range(min(turns, MOST_TURNS) if turns > 1 else 0)
    return _of_parts(batch, {f"turn_{turn + 1}": index_BR == turn for turn in shown})


def _of_parts(batch: Batch, masks: Mapping[str, Tensor]) -> Metrics:
    compared = batch["old_log_probs"], batch["rollout_log_probs"]
    found = {part: _figures(*mismatch_sums(*compared, mask)) for part, mask in masks.items()}
    return _named({f"{part}/{name}": x for part, figures in found.items() for name, x in figures.items()})


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


def _named(figures: Metrics) -> Metrics:
    return {f"mismatch/{name}": x for name, x in figures.items()}
