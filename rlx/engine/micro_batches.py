"""Divide each process's rows into micro-batches, as many on every process, and lay rows out for a forward.

Shape letters as in `rlx/data/batch.py`: B rows, P prompt tokens (left padded), R response tokens (right padded), T = P + R.

A packed micro-batch is one row of N tokens without padding: its sequences follow one another, or share their beginnings.

A group is a list of rows whose prompts are equal, and are computed once for all of them where they are in one micro-batch.

Note [rows start at column 0]: in a padded micro-batch every row begins with its first prompt token, and all padding follows
its last token. A causal model then never sees padding and needs no attention mask. The fastest kernels therefore apply, and no
query is left without keys, for which some kernels return NaN gradients. Responses begin in different columns, so the R columns
of a micro-batch are a window of W columns that holds them all; `lead` is the column in which each row's response begins.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlx.data.batch import EXPERTS, TENSORS, Batch, partition, places_of
from rlx.models.loading import why_not_shared
from rlx.models.prefix_tree import NEVER, Tree, tree_of_rows
from rlx.models.tree_attention import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class MicroBatchRule:
    """The largest micro-batch: either a number of `rows`, or of `tokens` that its forward computes."""

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        assert (self.rows is None) != (self.tokens is None), "one of them is the limit"


class RowLength(NamedTuple):
    """Tokens of one row, from the first prompt token to the last response token."""

    prompt: int
    response: int


def row_lengths(batch: Batch) -> list[RowLength]:
    mask_BP, mask_BR = batch["attention_mask"].tensor_split([batch.prompt_length], dim=1)
    prompts = _reach(mask_BP.flip(1)).tolist()
    return [RowLength(p, r) for p, r in zip(prompts, _reach(mask_BR).tolist(), strict=True)]


def _reach(mask: Tensor) -> Tensor:
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
    return torch.cat([torch.zeros_like(places[:, :1]), places], dim=1).amax(dim=1)


def groups_of(batch: Batch, lengths: Sequence[RowLength], least_gain: float) -> list[list[int]]:
    """Return rows with equal prompts together, if computing a prompt once saves more than a share of the rows' tokens."""
    width, keys = batch.prompt_length, token_keys(batch) if least_gain < NEVER else batch["input_ids"]
    prompts = (ids[width - length.prompt : width].numpy().tobytes() for ids, length in zip(keys, lengths, strict=True))
    found: list[list[int]] = []
    for rows in places_of(prompts).values():
        every = sum(sum(lengths[row]) for row in rows)
        pays = every - unique_tokens(rows, lengths) > least_gain * every
        found += [rows] if pays else [[row] for row in rows]
    return found


def token_keys(batch: Batch) -> Tensor:
    """Return numbers (B, T) int64 that are equal where rows can share a token: the tokens are equal, and so are given experts."""
    if EXPERTS not in batch:
        return batch["input_ids"]
    experts_BTLK = batch[EXPERTS]
    size = experts_BTLK[0, 0].numel() if len(batch) else 1
    factors = torch.randint(1, 1 << 62, (size,), generator=torch.Generator().manual_seed(0))
    # A hash, by sums that wrap around; row by row, because it needs eight bytes for each expert.
    hashes = [(row.flatten(1).long() * factors).sum(dim=1) for row in experts_BTLK]
    return (batch["input_ids"] + torch.stack(hashes)) & torch.iinfo(torch.int64).max if hashes else batch["input_ids"]


def unique_tokens(group: Sequence[int], lengths: Sequence[RowLength]) -> int:
    """Return the tokens of a group, or of a part of it, whose prompt counts once."""
    return max((lengths[row].prompt for row in group), default=0) + sum(lengths[row].response for row in group)


def divide(
    lengths: Sequence[RowLength],
    rule: MicroBatchRule,
    packs: bool,
    at_least: int = 0,
    groups: Sequence[list[int]] | None = None,
) -> list[list[int]]:
    """Return the row numbers of each micro-batch; together they hold each row exactly once.

    A row that is longer than a limit of tokens becomes a micro-batch of its own. If rows are not packed, padding counts as tokens.
    The processes agree on `at_least` micro-batches, some of them possibly empty. Packed rows of a group stay together as far as
    the limit allows.
    """
    if not packs:
        return _divide_padded(lengths, rule, at_least)
    return _divide_packed(lengths, rule, at_least, [[row] for row in range(len(lengths))] if groups is None else groups)


def _divide_packed(
    lengths: Sequence[RowLength], rule: MicroBatchRule, at_least: int, groups: Sequence[list[int]]
) -> list[list[int]]:
    """Return as few micro-batches as the limit allows, with similar numbers of tokens, the largest first."""
    units = [part for group in groups for part in _within(group, lengths, rule)]
    while len(units) < at_least and (largest := max(units, key=len, default=[])) and len(largest) > 1:
        units.remove(largest)
        units += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    tokens = [unique_tokens(unit, lengths) for unit in units]
    largest_unit = max(map(len, units), default=1)
    room = max(1, len(units)) if rule.rows is None else rule.rows // largest_unit
    limit = max(1, sum(tokens)) if rule.tokens is None else rule.tokens
    fewest = max(-(-len(units) // room), -(-sum(min(own, limit) for own in tokens) // limit))
    for count in range(max(at_least, fewest, 1), max(at_least, len(units)) + 1):
        parts = partition(tokens, count, [room] * count)
        loads = [sum(tokens[unit] for unit in part) for part in parts]
        if all(load <= limit or len(part) == 1 for load, part in zip(loads, parts, strict=True)):
            # Each process begins with its largest micro-batch, so that no process waits long at the collectives.
            in_order = sorted(zip(loads, parts, strict=True), key=lambda pair: -pair[0])
            return [sorted(row for unit in part for row in units[unit]) for _, part in in_order]
    return []


def _within(group: list[int], lengths: Sequence[RowLength], rule: MicroBatchRule) -> list[list[int]]:
    """Return the group in as few similar parts as the limit allows."""
    for count in range(1, len(group)):
        parts = [[group[i] for i in part] for part in partition([lengths[row].response for row in group], count)]
        if all(
            len(part) <= (rule.rows or len(part))
            and (rule.tokens is None or unique_tokens(part, lengths) <= rule.tokens)
            for part in parts
        ):
            return parts
    return [[row] for row in group]


def _divide_padded(lengths: Sequence[RowLength], rule: MicroBatchRule, at_least: int) -> list[list[int]]:
    """Divide by rows or by tokens, then halve the micro-batches with most rows until there are `at_least`; add empty ones.

    By rows: a micro-batch takes prompts of similar length, so that the window of their responses is narrow; the last one may be
    smaller. By tokens: the longest rows come first, so that rows of similar length share their padding.
    """
    if rule.rows is not None:
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i].prompt, i))
        parts = [order[first : first + rule.rows] for first in range(0, len(order), rule.rows)]
    else:
        parts = []
        for row in sorted(range(len(lengths)), key=lambda i: (-sum(lengths[i]), i)):
            if parts and (len(parts[-1]) + 1) * sum(lengths[parts[-1][0]]) <= (rule.tokens or 1):
                parts[-1].append(row)
            else:
                parts.append([row])
    while len(parts) < at_least and (largest := max(parts, key=len, default=[])) and len(largest) > 1:
        at, half = parts.index(largest), (len(largest) + 1) // 2
        parts[at : at + 1] = [largest[:half], largest[half:]]
    return parts + [[] for _ in range(at_least - len(parts))]


class PackedRow(NamedTuple):
    """Sequences in one row, each without its last token, which predicts nothing. Integers are int64 where not said otherwise."""

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N), in the sequences
    starts: Tensor  # (S + 1,) int32, the first token of each of the tree's S segments, and N
    tree: Tree  # of the tokens, on the host
    # (K,), indices of the tokens that predict response tokens; a prompt's last token occurs once for each response to it
    predicting: Tensor
    targets: Tensor  # (1, K), the response tokens they predict
    places: Tensor  # (K,), indices of the targets in the flattened window (B, W)
    copies: Tensor | None = None  # (N,), how many rows hold each token; None in a part of a row
    experts: Tensor | None = None  # (N, L, K) given to the routers of a mixture of experts, if there are any


class MicroBatch(NamedTuple):
    """Rows laid out for one forward; see Note [rows start at column 0].

    A dummy has one row with an empty response mask: it takes part in the collectives and weighs nothing.
    """

    rows: list[int]  # their numbers among the process's rows; empty for a dummy
    batch: Batch  # the columns, in which R is the window W
    lead: Tensor  # (B,) int64 on CPU, window columns before each row's first response token
    packed: PackedRow | None = None  # the tokens that a model with packed sequences reads in place of the batch's

    def to(self, device: torch.device) -> "MicroBatch":
        packed = self.packed and PackedRow(*(to_device(x, device) if isinstance(x, Tensor) else x for x in self.packed))
        columns = self.batch.tensors.apply(lambda column: to_device(column, device))
        return self._replace(batch=Batch(columns, self.batch.info), packed=packed)


def pack(batch: Batch, rows: list[int], lengths: Sequence[RowLength], least_gain: float = NEVER) -> MicroBatch:
    """Lay some rows out as one packed row, or a dummy if there are none. Responses keep their columns, without trailing empty ones.

    `lengths` are those of all rows; for `least_gain` see `tree_of_rows`.
    """
    share, chosen = (batch.rows(rows), [lengths[row] for row in rows]) if rows else (_dummy(batch), [RowLength(1, 1)])
    # A row without response tokens counts as having one, which is padding.
    sizes = [RowLength(max(1, prompt), max(1, response)) for prompt, response in chosen]
    width = max(size.response for size in sizes)

    def own_tokens(column: Tensor) -> list[Tensor]:
        return [x[share.prompt_length - p : share.prompt_length + r] for x, (p, r) in zip(column, sizes, strict=True)]

    tokens = own_tokens(share["input_ids"])
    keys = own_tokens(token_keys(share)) if least_gain < NEVER else tokens
    tree, pieces, places = tree_of_rows([own[:-1] for own in keys], least_gain)
    experts = own_tokens(share[EXPERTS]) if EXPERTS in share else None
    packed = PackedRow(
        torch.cat([tokens[row][slice(*columns)] for row, columns in pieces])[None],
        tree.positions()[None],
        torch.tensor(tree.starts, dtype=torch.int32),
        tree,
        torch.cat([own[p - 1 : p + r - 1] for own, (p, r) in zip(places, sizes, strict=True)]),
        torch.cat([own[p:] for own, (p, _) in zip(tokens, sizes, strict=True)])[None],
        torch.cat([torch.arange(r) + number * width for number, (_, r) in enumerate(sizes)]),
        # A row without response tokens has one that is padding, and so one token less that predicts another.
        torch.cat([own[: max(0, p + r - 1)] for own, (p, r) in zip(places, chosen, strict=True)]).bincount(
            minlength=tree.starts[-1]
        ),
        None if experts is None else torch.cat([experts[row][slice(*columns)] for row, columns in pieces]),
    )
    last = {"": None, "T": share.prompt_length + width, "R": width}
    columns = {
        name: x[:, : last[letter]] if (letter := TENSORS[name].shape[1:]) else x
        for name, x in share.drop(EXPERTS).tensors.items()
    }
    return MicroBatch(rows, Batch.of(columns), torch.zeros(len(sizes), dtype=torch.int64), packed)


def token_counts(batch: Batch, parts: Sequence[MicroBatch]) -> dict[str, float]:
    """Return the tokens of the rows, each without its last, and the tokens that their packed micro-batches compute."""
    trees = [part.packed.tree for part in parts if part.rows and part.packed is not None]
    return {
        "tokens": float(sum(max(1, prompt) + max(1, response) - 1 for prompt, response in row_lengths(batch))),
        "tokens_computed": float(sum(tree.starts[-1] - tree.padding for tree in trees)),
    }


def take(batch: Batch, rows: list[int], lengths: Sequence[RowLength]) -> MicroBatch:
    """Lay rows out as a padded micro-batch, or a dummy if there are none."""
    if not rows:
        return MicroBatch(rows, _dummy(batch), torch.zeros(1, dtype=torch.int64))
    prompts = torch.tensor([max(1, lengths[row].prompt) for row in rows])
    tokens = prompts + torch.tensor([max(1, lengths[row].response) for row in rows])
    lead = prompts - prompts.min()
    width = int(tokens.max())
    starts = {"T": (batch.prompt_length - prompts, width), "R": (-lead, width - int(prompts.min()))}

    def lay_out(name: str, column: Tensor) -> Tensor:
        letter = TENSORS[name].shape[1:2]
        return shifted(column, *starts[letter]) if letter else column

    chosen = batch.rows(rows)
    return MicroBatch(rows, Batch.of({name: lay_out(name, column) for name, column in chosen.tensors.items()}), lead)


def shifted(column: Tensor, start: Tensor, width: int) -> Tensor:
    """Return `width` entries of each row of (B, N, …) from its own `start` (B,) on, which may be negative; 0 outside the row."""
    index = start[:, None] + torch.arange(width)
    outside = (index < 0) | (index >= column.shape[1])
    entries = column[torch.arange(len(column))[:, None], index.clamp(0, column.shape[1] - 1)]
    return entries.masked_fill(outside.view(*outside.shape, *[1] * (column.dim() - 2)), 0)


def _dummy(batch: Batch) -> Batch:
    def shape(name: str, column: Tensor) -> list[int]:
        sizes = zip(TENSORS[name].shape, column.shape, strict=True)
        return [{"B": 1, "T": 2, "R": 1}.get(letter, size) for letter, size in sizes]

    columns = {name: torch.zeros(shape(name, column), dtype=column.dtype) for name, column in batch.tensors.items()}
    return Batch.of(columns | {"attention_mask": torch.ones(1, 2, dtype=torch.bool)})


class SequenceGroup:
    """Neighbouring processes that share every row of packed sequences (Ulysses). All processes build theirs together.

    Raises ValueError if `size` does not divide the number of processes or of query heads, or if the frequencies of the model's
    rotary embedding depend on the longest sequence, and each process sees only a part of it.
    """

    def __init__(self, size: int, config: "PreTrainedConfig"):
        if fault := why_not_shared(size, dist.get_world_size(), config):
            raise ValueError(fault)
        self.size = size
        self.processes, _ = dist.new_subgroups(group_size=size)

    def own(self, packed: PackedRow) -> PackedRow:
        """Return this process's part of the row. All parts have equally many tokens; a root of padding fills the last.

        `starts` and `tree` remain those of the whole row. A part that predicts no response token still predicts
        one token, whose figure is not used.
        """
        count = packed.input_ids.shape[1]
        padding = -count % self.size
        share = (count + padding) // self.size
        first = dist.get_rank(self.processes) * share
        ids = F.pad(packed.input_ids, (0, padding))[:, first : first + share]
        positions = torch.cat([packed.position_ids, torch.arange(padding)[None]], dim=1)[:, first : first + share]
        starts = F.pad(packed.starts, (0, 1), value=count + padding) if padding else packed.starts
        inside = (packed.predicting >= first) & (packed.predicting < first + share)
        predicting, targets = packed.predicting[inside] - first, packed.targets[:, inside]
        if not inside.any():
            predicting, targets = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
        places = packed.places[inside]
        return PackedRow(ids, positions, starts, packed.tree.with_padding(padding), predicting, targets, places)


class MicroBatcher:
    """Divides batches for a model that packs rows or pads them, and shares prompts by `least_gain`, see `tree_of_rows`.

    `copies` is the number of processes that share each sequence.
    """

    def __init__(self, packs: bool, least_gain: float, sequences: SequenceGroup | None, device: torch.device):
        self._packs, self._least_gain, self._sequences, self._device = packs, least_gain, sequences, device
        self.copies = 1 if sequences is None else sequences.size
        self.shares_prompts = least_gain < NEVER

    def micro_batches(self, batch: Batch, micro: MicroBatchRule) -> Iterator[MicroBatch]:
        """Yield this process's rows on the device. All processes yield equally many micro-batches; empty ones are dummies."""
        lengths, packs = row_lengths(batch), self._packs
        groups = groups_of(batch, lengths, self._least_gain)
        if micro.tokens is not None:
            micro = MicroBatchRule(tokens=micro.tokens * self.copies)
        count, most = 0, 1
        while count < most:  # on all processes together
            count = most
            parts = divide(lengths, micro, packs, count, groups)
            most = self._most(len(parts))
        for rows in parts:
            part = pack(batch, rows, lengths, self._least_gain) if packs else take(batch, rows, lengths)
            if self._sequences is not None and part.packed is not None:
                part = part._replace(packed=self._sequences.own(part.packed))
            yield part.to(self._device)

    def _most(self, count: int) -> int:
        if dist.get_world_size() == 1:
            return count  # without waiting for the device
        largest = torch.tensor(count, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)
