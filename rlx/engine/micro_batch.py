"""The cut of one process's share into micro-batches: pure decisions on row lengths, then columns cut to what is used.

Shape letters as in `rlx/data/batch.py`: B rows, P prompt tokens (left padded), R response tokens (right padded), T = P + R.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.data.batch import TENSORS, Batch


@dataclass(frozen=True)
class MicroBatchRule:
    """How large a micro-batch may be: by `rows`, or by `tokens` that its forward computes, padding included.

    Raises:
        ValueError: both or neither are given, or below 1.
    """

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        given = [size for size in (self.rows, self.tokens) if size is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError(
                f"micro-batch rule: got rows={self.rows}, tokens={self.tokens}, expected exactly one of them, at least 1"
            )


class RowLength(NamedTuple):
    """Tokens of one row, from the first prompt token to the last response token."""

    prompt: int
    response: int


def row_lengths(batch: Batch) -> list[RowLength]:
    """How much of each row is no outer padding."""
    response = batch.response_length
    mask_BT = batch["attention_mask"]
    mask_BP, mask_BR = mask_BT[:, : mask_BT.shape[1] - response], mask_BT[:, mask_BT.shape[1] - response :]
    prompts = _reach(mask_BP.flip(1)).tolist()
    return [RowLength(p, r) for p, r in zip(prompts, _reach(mask_BR).tolist(), strict=True)]


def _reach(mask: Tensor) -> Tensor:
    """Per row, one past the last True."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
    return torch.cat([torch.zeros_like(places[:, :1]), places], dim=1).amax(dim=1)


def cut(lengths: Sequence[RowLength], rule: MicroBatchRule, at_least: int = 0) -> list[list[int]]:
    """Row numbers of each micro-batch.

    By rows: contiguous, the last one ragged. By tokens: longest rows first, so that rows of like length share their
    padding; a row longer than the limit is its own micro-batch. When there are fewer than `at_least`, the ones with most
    rows are halved; what is still missing then is empty.

    Args:
        lengths: of the rows, in their order.
        rule: the limit.
        at_least: micro-batches that the processes agreed on.

    Returns:
        Each row exactly once.
    """
    parts = _by_rows(len(lengths), rule.rows) if rule.rows is not None else _by_tokens(lengths, rule.tokens or 1)
    while len(parts) < at_least and (largest := max(parts, key=len, default=[])) and len(largest) > 1:
        at, half = parts.index(largest), (len(largest) + 1) // 2
        parts[at : at + 1] = [largest[:half], largest[half:]]
    return parts + [[] for _ in range(at_least - len(parts))]


def _by_rows(count: int, rows: int) -> list[list[int]]:
    return [list(range(first, min(first + rows, count))) for first in range(0, count, rows)]


def _by_tokens(lengths: Sequence[RowLength], tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    prompt = response = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-sum(lengths[i]), i)):
        wider = max(prompt, lengths[row].prompt), max(response, lengths[row].response)
        if parts and (len(parts[-1]) + 1) * sum(wider) <= tokens:
            parts[-1].append(row)
            prompt, response = wider
        else:
            parts.append([row])
            prompt, response = lengths[row]
    return parts


def take(batch: Batch, rows: Sequence[int], lengths: Sequence[RowLength]) -> Batch:
    """These rows, without the columns that are padding in all of them; at least one prompt and one response column stay.

    No rows give a dummy: one row of one prompt and one response token that is in no response mask, so that it takes
    part in every collective and weighs nothing.
    """
    if not rows:
        return _dummy(batch)
    prompt = max(1, *(lengths[row].prompt for row in rows))
    response = max(1, *(lengths[row].response for row in rows))
    first = batch["input_ids"].shape[1] - batch.response_length - prompt

    def trim(name: str, tensor: Tensor) -> Tensor:
        width = TENSORS[name].shape[1:]
        return (
            tensor[:, first : first + prompt + response]
            if width == "T"
            else tensor[:, :response]
            if width == "R"
            else tensor
        )

    chosen = batch.rows(rows)
    return Batch.of({name: trim(name, tensor) for name, tensor in chosen.tensors.items()})


def _dummy(batch: Batch) -> Batch:
    widths = {"": (), "T": (2,), "R": (1,)}
    columns = {
        name: torch.zeros(1, *widths[TENSORS[name].shape[1:]], dtype=column.dtype)
        for name, column in batch.tensors.items()
    }
    return Batch.of(columns | {"attention_mask": torch.ones(1, 2, dtype=torch.bool)})
