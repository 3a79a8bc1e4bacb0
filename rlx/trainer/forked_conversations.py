"""Conversations of several rows, which on_rewritten_history=fork makes. Pure functions. Shape letters as in `rlx/data/batch.py`.

A branch is a row, and the column `branch` numbers those of a conversation. Rewards, selection and validation see one row for each
conversation, its last branch. `all_rows` adds the earlier ones, with the column, before the models run. `over_samples` computes over
the tokens of a sample, such as advantages: it lays a conversation's branches one after the other (`joined`), so that a
conversation counts once, and takes the new columns apart again (`parted`).
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rlx.data.batch import TENSORS, Batch, concat

T = TypeVar("T")
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
    first = of_conversation.with_(**first.tensors)
    whole = concat([first, batch.with_prompts(widest)])
    places = [*((row, branch) for row, count in enumerate(counts) for branch in range(count)), *enumerate(counts)]
    order = sorted(range(len(whole)), key=places.__getitem__)
    return whole.rows(order).with_(branch=torch.tensor([places[row][1] for row in order]))


def conversations_of(batch: Batch) -> Batch:
    """Return a row for each conversation, for what all its rows share: B columns and info."""
    return batch.rows(batch[BRANCH].eq(0).nonzero().flatten().tolist()) if BRANCH in batch else batch


def last_rows(batch: Batch) -> Batch:
    """Return the last row of each conversation."""
    if BRANCH not in batch:
        return batch
    samples = [*zip(batch["group_id"].tolist(), batch.info["sample"], batch[BRANCH].tolist(), strict=True)]
    last = {(group, sample): branch for group, sample, branch in sorted(samples)}
    return batch.rows([row for row, (group, sample, branch) in enumerate(samples) if last[group, sample] == branch])


def sampled_tokens(batch: Batch) -> Tensor:
    """Return the number of sampled tokens of each conversation of a batch before `all_rows`, (B,) int64."""
    return _over_rows(batch, lambda rows: rows["response_mask"])


def written_tokens(batch: Batch) -> Tensor:
    """Return the same of all tokens behind the prompts; a history that a row repeats counts again."""
    return _over_rows(batch, lambda rows: rows["attention_mask"][:, rows.prompt_length :])


def _over_rows(batch: Batch, mask_of: Callable[[Batch], Tensor]) -> Tensor:
    earlier = [0 if each is None else int(mask_of(each).sum()) for each in batch.info.get(EARLIER, [])]
    return mask_of(batch).sum(dim=1) + torch.tensor(earlier or [0])


class _Places(NamedTuple):
    """Where the response columns of each row are in the joined batch."""

    joined_B: Tensor  # row
    first_B: Tensor  # column
    inside_BR: Tensor  # True up to the last sampled token
    conversations: list[int]  # the first row of each

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each token inside."""
        columns_BR = self.first_B[:, None] + torch.arange(self.inside_BR.shape[1])
        return self.joined_B[:, None].expand_as(columns_BR)[self.inside_BR], columns_BR[self.inside_BR]


def _places(batch: Batch) -> _Places:
    mask_BR = batch["response_mask"]
    columns = torch.arange(mask_BR.shape[1])
    reach_B = ((columns + 1) * mask_BR).amax(dim=1)
    branches, groups, samples = batch[BRANCH].tolist(), batch["group_id"].tolist(), batch.info["sample"]
    joined_B, first_B, found = torch.zeros_like(reach_B), torch.zeros_like(reach_B), []
    order = sorted(range(len(batch)), key=lambda row: (groups[row], samples[row], branches[row]))
    for number, (_, rows) in enumerate(groupby(order, key=lambda row: (groups[row], samples[row]))):
        start = 0
        for row in rows:
            if start == 0:
                found.append(row)
            joined_B[row], first_B[row] = number, start
            start += int(reach_B[row]) + 1  # a column parts the turns of two rows
    return _Places(joined_B, first_B, columns < reach_B[:, None], found)


def joined(batch: Batch) -> Batch:
    """Return a row for each conversation with the response columns of its branches one after the other, and the B columns.

    The same batch if no conversation has several rows.
    """
    if BRANCH not in batch:
        return batch
    places = _places(batch)
    inside, at = places.inside_BR, places.of_tokens()
    width = int(at[1].max()) + 1 if len(at[1]) else 1
    tensors = {}
    for name, column in batch.tensors.items():
        if TENSORS[name].shape == "BR":
            tensors[name] = column.new_zeros(len(places.conversations), width)
            tensors[name][at] = column[inside]
        elif TENSORS[name].shape == "B" and name != BRANCH:
            tensors[name] = column[places.conversations]
    return Batch.of(
        tensors, {name: [values[row] for row in places.conversations] for name, values in batch.info.items()}
    )


def parted(whole: Batch, batch: Batch) -> Batch:
    """Return `batch` with the columns that `whole`, made by `joined`, has got in addition."""
    if BRANCH not in batch:
        return whole
    places = _places(batch)
    inside, at = places.inside_BR, places.of_tokens()
    added = {}
    for name, column in whole.tensors.exclude(*batch.tensors.keys()).items():
        if TENSORS[name].shape == "B":
            added[name] = column[places.joined_B]
            continue
        added[name] = column.new_zeros(inside.shape)
        added[name][inside] = column[at]
    return batch.with_(**added)


def over_samples(batch: Batch, work: Callable[[Batch], tuple[Batch, T]]) -> tuple[Batch, T]:
    """Return the batch with the columns that `work` adds to a batch of one row for each sample, and what else it returns."""
    whole, found = work(joined(batch))
    return parted(whole, batch), found


def with_sample_tokens(batch: Batch, counted: str) -> Batch:
    """Write `sample_tokens`, of the mask `counted`, if conversations have several rows."""
    if BRANCH not in batch:
        return batch
    places = _places(batch)
    tokens_C = torch.zeros(len(places.conversations), dtype=torch.int64)
    tokens_C.index_add_(0, places.joined_B, batch[counted].sum(dim=1))
    return batch.with_(sample_tokens=tokens_C[places.joined_B])
