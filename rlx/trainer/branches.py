"""Conversations of several rows, which on_rewritten_history=fork makes. Pure functions. Shape letters as in `rlx/data/batch.py`.

A branch is a row. Rewards, selection and validation see one row for each conversation, its last branch. `all_rows` adds the earlier
ones before the models run. `joined` lays a conversation's branches one after the other, and `parted` undoes it: so everything that
is computed over the tokens of a sample, such as advantages, counts a conversation once.
"""

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.data.batch import TENSORS, Batch, concat

BRANCH, EARLIER = "branch", "earlier_rows"


def all_rows(batch: Batch) -> Batch:
    """Return a row for each branch, those of a conversation in order, with the column `branch`; the same rows if none forked."""
    earlier = batch.info.get(EARLIER, [])
    info = {name: values for name, values in batch.info.items() if name != EARLIER}
    batch, added = Batch(batch.tensors, info), [each for each in earlier if each is not None]
    if not added:
        return batch
    counts = [0 if each is None else len(each) for each in earlier]
    widest = max(each.prompt_length for each in (batch, *added))
    first = concat([each.with_prompts(widest) for each in added])
    of_conversation = batch.rows([row for row, count in enumerate(counts) for _ in range(count)])
    first = Batch({**of_conversation.tensors, **first.tensors}, of_conversation.info)
    whole = concat([first, batch.with_prompts(widest)])
    rows, branches, next_first = [], [], 0
    for row, count in enumerate(counts):
        rows += [*range(next_first, next_first + count), len(first) + row]
        branches += range(count + 1)
        next_first += count
    return whole.rows(rows).with_(branch=torch.tensor(branches))


def conversations_of(batch: Batch) -> Batch:
    """Return a row for each conversation, for what all its rows share: B columns and info."""
    return batch.rows(batch[BRANCH].eq(0).nonzero().flatten().tolist()) if BRANCH in batch else batch


def sampled_tokens(batch: Batch) -> Tensor:
    """Return the number of sampled tokens of each conversation of a batch before `all_rows`, (B,) int64."""
    earlier = [0 if each is None else int(each["response_mask"].sum()) for each in batch.info.get(EARLIER, [])]
    return batch["response_mask"].sum(dim=1) + torch.tensor(earlier or [0])


class _Places(NamedTuple):
    """The joined row and its column for each response token of each row up to the last sampled one (`inside_BR`)."""

    row_BR: Tensor
    column_BR: Tensor
    inside_BR: Tensor
    first: list[int]  # row of each conversation


def _places(batch: Batch) -> _Places:
    mask_BR = batch["response_mask"]
    columns = torch.arange(mask_BR.shape[1])
    reach_B = ((columns + 1) * mask_BR).amax(dim=1)
    branches, groups, samples = batch[BRANCH].tolist(), batch["group_id"].tolist(), batch.info["sample"]
    row_B, start_B, first = torch.zeros_like(reach_B), torch.zeros_like(reach_B), []
    order = sorted(range(len(batch)), key=lambda row: (groups[row], samples[row], branches[row]))
    for number, (_, rows) in enumerate(groupby(order, key=lambda row: (groups[row], samples[row]))):
        start = 0
        for row in rows:
            if start == 0:
                first.append(row)
            row_B[row], start_B[row] = number, start
            start += int(reach_B[row]) + 1  # a column lies between turns
    return _Places(row_B[:, None].expand(mask_BR.shape), start_B[:, None] + columns, columns < reach_B[:, None], first)


def joined(batch: Batch) -> Batch:
    """Return a row for each conversation with the response columns of its branches one after the other, and the B columns.

    The same batch if no conversation has several rows.
    """
    if BRANCH not in batch:
        return batch
    places = _places(batch)
    inside = places.inside_BR
    at = places.row_BR[inside], places.column_BR[inside]
    width = int(at[1].max()) + 1 if len(at[1]) else 1
    tensors = {}
    for name, column in batch.tensors.items():
        if TENSORS[name].shape == "BR":
            tensors[name] = column.new_zeros(len(places.first), width)
            tensors[name][at] = column[inside]
        elif TENSORS[name].shape == "B" and name != BRANCH:
            tensors[name] = column[places.first]
    return Batch.of(tensors, {name: [values[row] for row in places.first] for name, values in batch.info.items()})


def parted(whole: Batch, batch: Batch) -> Batch:
    """Return `batch` with the response columns that `whole`, made by `joined`, has got in addition."""
    if BRANCH not in batch:
        return whole
    places = _places(batch)
    inside = places.inside_BR
    at = places.row_BR[inside], places.column_BR[inside]
    added = {}
    for name in whole.tensors.keys() - batch.tensors.keys():
        added[name] = whole[name].new_zeros(inside.shape)
        added[name][inside] = whole[name][at]
    return batch.with_(**added)
