"""Scoring the policy on held-out prompts, and keeping what it wrote."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlx.data.batch import Batch
from rlx.rewards.manager import Scores


def chunks(size: int, step: int | None) -> Iterator[list[int]]:
    """0..size-1 in order, `step` at a time; all at once for None."""
    step = step or max(size, 1)
    for first in range(0, size, step):
        yield list(range(first, min(first + step, size)))


def summarise(batch: Batch, scores: Scores) -> dict[str, float]:
    """Validation metrics: accuracy, reward, length, accuracy by data source where there are several, and the means of
    what else the reward functions reported as `val/extra/...`, where no name of theirs can hide one of these."""
    lengths = batch["response_mask"].sum(dim=1).float()
    right = scores.right()
    metrics = extras(scores, "val") | {
        "val/accuracy": right.mean().item(),
        "val/reward": scores.scores.mean().item(),
        "val/response_length": lengths.mean().item(),
    }
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, source in enumerate(batch.info["data_source"]):
        rows_of[source].append(row)
    if len(rows_of) > 1:
        for source, rows in rows_of.items():
            metrics[f"val/accuracy/{source}"] = right[rows].mean().item()
    return metrics


def extras(scores: Scores, prefix: str) -> dict[str, float]:
    """Means of what the reward functions reported beside the score, over the samples that have it."""
    return {
        f"{prefix}/extra/{name}": torch.tensor(values, dtype=torch.float64).nanmean().item()
        for name, values in scores.extra.items()
    }


def generations(batch: Batch, scores: Scores) -> list[dict[str, Any]]:
    """One readable record per sample; numbers that JSON has no words for (a missing one is NaN) are None."""
    return [
        {
            **{name: values[i] if math.isfinite(values[i]) else None for name, values in scores.extra.items()},
            "prompt": batch.info["prompt_text"][i],
            "response": batch.info["response_text"][i],
            "ground_truth": batch.info["ground_truth"][i],
            "data_source": batch.info["data_source"][i],
            "score": score,
        }
        for i, score in enumerate(scores.scores.tolist())
    ]


def dump(records: list[dict[str, Any]], folder: Path, step: int) -> None:
    """Writes <folder>/<step>.jsonl, one record a line."""
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False, default=str) for record in records)
    (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
