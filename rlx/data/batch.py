"""The batch: its columns with their shapes and dtypes, and who writes each.

Shape letters: B samples, P prompt tokens (left padded), R response tokens (right padded), T = P + R; L decoder layers, K experts that
process a token in a layer.
A leaf: imports only numpy, torch and tensordict.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from tensordict import TensorDict

Value = TypeVar("Value")


class Column(NamedTuple):
    """A column: a letter per dimension, its dtype, who writes it, and its meaning."""

    shape: str
    dtype: torch.dtype
    writer: str
    meaning: str


I64, I32, I16, F32, BOOL = torch.int64, torch.int32, torch.int16, torch.float32, torch.bool

TENSORS: dict[str, Column] = {
    "prompt_ids": Column("BP", I64, "data", "prompt tokens, left padded; removed when the rollout writes input_ids"),
    "prompt_mask": Column("BP", BOOL, "data", "True on prompt tokens"),
    "budget": Column("B", I64, "trainer", "most tokens to sample now; 0: all that are left"),
    "group_id": Column("B", I64, "trainer", "samples of one prompt share it; unique within a batch"),
    "seed": Column("B", I64, "trainer", "sampling seed: a hash of (run, step, prompt, sample)"),
    "input_ids": Column("BT", I64, "rollout", "prompt and response"),
    "attention_mask": Column("BT", BOOL, "rollout", "True on tokens that are not padding"),
    "response_mask": Column("BR", BOOL, "rollout", "True on tokens the policy wrote, the closing EOS included"),
    "rollout_log_probs": Column("BR", F32, "rollout", "log-prob of each token under the sampler"),
    # 0 in layers without experts, on padding and the last token
    "routed_experts": Column("BTLK", I16, "rollout", "experts that the sampler used"),
    "policy_versions": Column("BR", I32, "rollout", "weight updates that the sampler of each token had received"),
    "turn_rewards": Column("BR", F32, "rollout", "reward of an environment for a turn, on the turn's last token"),
    # These two only if a conversation of the batch forked
    "branch": Column("B", I64, "trainer", "index of the row among those of its conversation"),
    "sample_tokens": Column("B", I64, "trainer", "tokens in the loss of all rows of the row's conversation"),
    "scores": Column("B", F32, "rewards", "one score per sample"),
    "greedy_scores": Column("B", F32, "rewards", "score of the greedy response to the prompt, if ReMax asks for it"),
    "model_scores": Column("B", F32, "reward", "the reward model's score of each sample"),
    "old_log_probs": Column("BR", F32, "actor", "log-prob under the policy before this step's updates"),
    "in_update": Column("B", BOOL, "trainer", "True on rows whose own update will compute old_log_probs"),
    "entropy": Column("BR", F32, "actor", "entropy of the next-token distribution"),
    # Of the token before, whose router states gave this token's distribution
    "differing_experts": Column("BR", F32, "actor", "share of layers whose router chooses others than the sampler's"),
    "differing_experts_used": Column("BR", F32, "actor", "the same for the experts that the forward used"),
    "rollout_is_weights": Column("BR", F32, "trainer", "factor of the loss that corrects the sampler's mismatch"),
    "loss_mask": Column(
        "BR", BOOL, "trainer", "the part of response_mask in the policy's loss, if tokens are rejected"
    ),
    "ref_log_probs": Column("BR", F32, "ref", "log-prob under the reference"),
    "values": Column("BR", F32, "critic", "value of the state in which each response token is chosen"),
    # Both minus the KL penalty if configured; an environment's rewards are on the last tokens of turns
    "token_rewards": Column("BR", F32, "trainer", "the score on the last response token"),
    "outcomes": Column("B", F32, "trainer", "what token_rewards add up to"),
    "advantages": Column("BR", F32, "algorithms", "advantage of each token"),
    "returns": Column("BR", F32, "algorithms", "regression target of the critic"),
}

SEQUENCE = ("input_ids", "attention_mask", "response_mask")
"""The columns that a model reads."""

SAMPLE_TOKENS = "sample_tokens"
"""The column that losses read in addition, if samples of the batch have several rows."""

EXPERTS = "routed_experts"
"""The column that routers of a mixture of experts read in addition, if the sampler writes it."""

INFO: dict[str, str] = {
    "data_source": "str: which reward function scores the sample (data)",
    "ground_truth": "Any: what the reward function compares with (data)",
    "extra_info": "dict: the row's extra_info (data)",
    "raw_prompt": "str or list of {role, content}: the prompt before tokenizer and chat template (data)",
    "prompt_text": "str: the prompt as the model sees it (data, or rollout with an environment)",
    "response_text": "str: all decoded tokens behind the prompt without special tokens (trainer)",
    "numbers": "dict: the numbers that reward functions report, by name; None where one is missing (trainer)",
    "sample": "int: index among the samples of its prompt (trainer)",
    "conversation": "dict: the turns with their times and rewards, and the reason of the end (rollout, with an environment)",
    "kept": "Kept or Conversation: what the sample has so far (rollout)",
    "earlier_rows": "Batch or None: the rows of the conversation before this one, if it forked (rollout, with an environment)",
}


class BatchError(ValueError):
    """A batch lacks a column or holds one of the wrong shape or dtype."""


@dataclass(frozen=True)
class Batch:
    """Tensors with B rows, and lists of length B for everything else.

    Floating columns may be fp64 in tests that ask for it. Experts are uint8 if there are at most 256 in a layer. The lists are
    no part of the TensorDict, which would keep equal values once and then has no rows to cut.
    """

    tensors: "TensorDict"  # batch size [B]; keys and shapes as in TENSORS
    info: dict[str, list[Any]] = field(default_factory=dict)  # lists of length B; keys as in INFO

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], info: dict[str, list[Any]] | None = None) -> "Batch":
        """Check the columns and wrap them. Raises BatchError."""
        rows = {name: tuple(tensor.shape[:1]) for name, tensor in tensors.items()}
        if len(set(rows.values())) != 1 or () in rows.values():
            raise BatchError(
                f"got columns with these numbers of rows: {rows}; expected at least one column, all with the same number"
            )
        from tensordict import TensorDict  # takes two seconds, in which a driver may wait for its workers

        batch = cls(TensorDict(dict(tensors), next(iter(rows.values()))), dict(info or {}))
        batch.check()
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (self.tensors.consolidate(), self.info)  # one buffer for all columns

    def __len__(self) -> int:
        return int(self.tensors.batch_size[0])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            writer = f"written by {TENSORS[name].writer}" if name in TENSORS else "no column of that name exists"
            raise BatchError(f"the batch has no column {name!r} ({writer}); it has {sorted(self.tensors.keys())}")
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def check(self) -> None:
        """Raise BatchError if a column is unknown or differs from TENSORS in shape or dtype."""
        sizes: dict[str, int] = {"B": len(self)}
        for name, tensor in self.tensors.items():
            if name not in TENSORS:
                raise BatchError(f"unknown column {name!r}; known: {sorted(TENSORS)}")
            want = TENSORS[name]
            same_kind = tensor.dtype == want.dtype or (want.dtype.is_floating_point and tensor.is_floating_point())
            same_kind = same_kind or (want.dtype, tensor.dtype) == (I16, torch.uint8)
            if tensor.dim() != len(want.shape) or not same_kind:
                raise BatchError(
                    f"{name}: got shape {tuple(tensor.shape)} {tensor.dtype}, expected ({', '.join(want.shape)}) {want.dtype}"
                )
            for letter, size in zip(want.shape, tensor.shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    raise BatchError(f"{name}: {letter} is {size}, but {sizes[letter]} in other columns")
        for name, values in self.info.items():
            if name not in INFO:
                raise BatchError(f"unknown info {name!r}; known: {sorted(INFO)}")
            if len(values) != len(self):
                raise BatchError(f"info {name!r} has {len(values)} entries, the batch {len(self)} rows")

    def with_(self, info: dict[str, list[Any]] | None = None, **tensors: Tensor) -> "Batch":
        """Return a batch with these columns added or replaced; the other columns are shared, not copied."""
        return Batch.of({**self.tensors, **tensors}, {**self.info, **(info or {})})

    def select(self, *names: str) -> "Batch":
        """Return only these tensor columns, without info: the part to send to a worker."""
        return Batch.of({name: self[name] for name in names})

    def drop(self, *names: str) -> "Batch":
        """Return the batch without these tensor columns, which need not exist."""
        return Batch(self.tensors.exclude(*names), self.info)

    def rows(self, index: Sequence[int]) -> "Batch":
        """Return the named rows in that order; a row may be named several times, and `index` may be empty."""
        take = list(index)
        tensors = self.tensors[torch.tensor(take, dtype=torch.int64)]
        return Batch(tensors, {name: [values[row] for row in take] for name, values in self.info.items()})

    def with_prompts(self, width: int) -> "Batch":
        """Return the batch with prompts left padded to `width` tokens, at least as many as now; tokens of padding are 0."""
        added = width - self.prompt_length
        columns = {name: self[name] for name in ("input_ids", "attention_mask", EXPERTS) if name in self}
        return self.with_(**{name: pad(x, (*[0] * 2 * (x.dim() - 2), added, 0)) for name, x in columns.items()})

    @property
    def prompt_length(self) -> int:
        """P, the width of the prompts."""
        return int(self["input_ids"].shape[1]) - self.response_length

    @property
    def response_length(self) -> int:
        """R, the width of the response columns."""
        return int(self["response_mask"].shape[1])

    def responses(self) -> Tensor:
        """Return the response tokens (B, R) int64."""
        return self["input_ids"][:, self["input_ids"].shape[1] - self.response_length :]

    def response_tokens(self) -> list[list[int]]:
        """Return the tokens behind each prompt, without padding."""
        masks = self["attention_mask"][:, self.prompt_length :]
        return [ids[mask].tolist() for ids, mask in zip(self.responses(), masks, strict=True)]

    def prompt_tokens(self) -> list[list[int]]:
        """Return the tokens of each prompt, without padding."""
        ids, masks = (self[name][:, : self.prompt_length] for name in ("input_ids", "attention_mask"))
        return [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]


def concat(batches: Sequence[Batch]) -> Batch:
    """Join the rows of all batches in order, without empty ones. Raises BatchError if they differ in columns or widths."""
    full = [b for b in batches if len(b)] or list(batches[:1])
    if not full:
        raise BatchError("no batch to join")
    shapes, info = _shapes_of_rows(full[0]), full[0].info.keys()
    for other in full[1:]:
        if _shapes_of_rows(other) != shapes:
            raise BatchError(f"batches differ in columns or widths: {shapes} and {_shapes_of_rows(other)}")
        if other.info.keys() != info:
            raise BatchError(f"batches differ in info: {sorted(info)} and {sorted(other.info)}")
    return Batch(torch.cat([b.tensors for b in full]), {k: [v for b in full for v in b.info[k]] for k in info})


def places_of(values: Iterable[Value]) -> dict[Value, list[int]]:
    """Return the places of each value, such as the rows of each group."""
    places: dict[Value, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return places


def left_padded(rows: Sequence[Sequence[int]], padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens of several lengths as ids (B, T) int64, left padded, and their mask (B, T) bool."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    ids_BT = pad_sequence(ids, batch_first=True, padding_value=padding, padding_side="left")
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return ids_BT, pad_sequence(masks, batch_first=True, padding_side="left")


def right_padded(
    rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Return numbers of several lengths, right padded, and their mask, both (B, width). A batch may have millions of numbers."""
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None]
    padded = torch.full(mask.shape, padding, dtype=dtype)
    padded[mask] = torch.from_numpy(np.fromiter(chain.from_iterable(rows), padded.numpy().dtype))
    return padded, mask


def _shapes_of_rows(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.tensors.items()}


EXCHANGES_PER_PART = 20


def partition(costs: Sequence[float], parts: int, room: Sequence[int] | None = None) -> list[list[int]]:
    """Divide items into parts so that the most expensive part costs little; return the numbers of each part's items, ascending.

    It assigns the longest processing time first (Graham 1969, SIAM J. Appl. Math. 17): the most expensive item left goes to the
    cheapest part that has `room` for so many items. Then, as long as it helps, the most expensive part exchanges an item for a
    cheaper one of another part. On random lengths this is as good as Karmarkar and Karp's differencing, and it respects room.
    """
    room = [len(costs)] * parts if room is None else room
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = min((p for p in range(parts) if len(found[p]) < room[p]), key=loads.__getitem__)
        found[part].append(item)
        loads[part] += costs[item]
    for _ in range(EXCHANGES_PER_PART * parts):
        if not _exchange(costs, found, loads, room):
            break
    return [sorted(items) for items in found]


def _exchange(costs: Sequence[float], found: list[list[int]], loads: list[float], room: Sequence[int]) -> bool:
    """Move cost from the most expensive part to the cheapest one that can take some; return False if none can."""
    dearest = max(range(len(loads)), key=loads.__getitem__)
    for other in sorted(range(len(loads)), key=loads.__getitem__):
        gap = loads[dearest] - loads[other]
        # If the other part has room, an item may also move without exchange.
        against = sorted((costs[item], item) for item in found[other])
        if len(found[other]) < room[other]:
            against.insert(0, (0.0, -1))
        best: tuple[float, int, int] | None = None
        for item in found[dearest]:
            place = bisect_left(against, (costs[item] - gap / 2, -1))
            for cost, back in against[max(0, place - 1) : place + 1]:
                moved = costs[item] - cost
                if 0 < moved < gap and (best is None or abs(moved - gap / 2) < abs(best[0] - gap / 2)):
                    best = moved, item, back
        if best is not None:
            moved, item, back = best
            found[dearest].remove(item)
            found[other].append(item)
            if back >= 0:
                found[other].remove(back)
                found[dearest].append(back)
            loads[dearest] -= moved
            loads[other] += moved
            return True
    return False
