"""Deal the rows of a batch to processes so that each takes about the same time, and groups stay together.

A group is the rows of one prompt. A process that has several of them may compute the prompt once (`model.use_shared_prefix`).
Shape letters as in `rlx/data/batch.py`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlx.algorithms.partition import partition
from rlx.cluster.mesh import share_ranges
from rlx.config.schema import ModelConfig
from rlx.data.batch import Batch

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


def balance(batch: Batch, parts: int, model: ModelConfig) -> Batch:
    """Reorder rows so that contiguous shares take about the same time; each share keeps the row count of a plain cut.

    A row of L tokens costs L * (1 + L / QUADRATIC_TOKENS). If prompts are shared, a process computes one once for all its rows
    of a group. Then groups stay whole, or are halved as often as it takes to come within `MOST_UNBALANCE` of the best.

    Args:
        batch: with group_id.
        parts: number of processes.
        model: whose rows are dealt.
    """
    rows = rows_of(batch, model)
    room = [len(share) for share in share_ranges(len(rows), parts)]
    deals = [deal(rows, chunks, room) for chunks in _chunks(rows)]
    dearest = [max(cost([rows[i] for i in share]) for share in shares) for shares in deals]
    # Deals come from whole groups to single rows.
    chosen = next(i for i, each in enumerate(dearest) if each <= min(dearest) * (1 + MOST_UNBALANCE))
    return batch.rows([row for share in deals[chosen] for row in share])


def rows_of(batch: Batch, model: ModelConfig) -> list[RowTokens]:
    """Return the rows, each in a group of its own if the model does not share prompts or little would be saved."""
    mask, width = batch["attention_mask"], batch.response_length
    prompts, responses = (x.sum(dim=1).tolist() for x in (mask[:, :-width], mask[:, -width:]))
    rows = [RowTokens(*each) for each in zip(prompts, responses, batch["group_id"].tolist(), strict=True)]
    saved = sum(prompts) - sum({row.group: row.prompt for row in rows}.values())
    if saved > model.least_gain * (sum(prompts) + sum(responses)):
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
    members: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        members.setdefault(row.group, []).append(number)
    most = max(map(len, members.values()), default=1)
    while True:
        yield [group[first : first + most] for group in members.values() for first in range(0, len(group), most)]
        if most == 1:
            return
        most = -(-most // 2)
