"""Divide each process's rows into micro-batches, as many on every process."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rlx.data.batch import Batch
from rlx.engine.forward import Forward
from rlx.engine.micro_batch import MicroBatch, MicroBatchRule, Packed, cut, groups_of, pack, row_lengths, take
from rlx.models.loading import why_not_shared
from rlx.models.prefix_tree import NEVER

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class SequenceGroup:
    """Neighbouring processes that share every row of packed sequences (Ulysses). All processes build theirs together.

    Args:
        size: processes that share a row.
        config: of the model that reads the row.

    Raises:
        ValueError: `size` does not divide the number of processes or of query heads; or the frequencies of the model's rotary
            embedding depend on the longest sequence, and each process would only see a part of it.
    """

    def __init__(self, size: int, config: "PreTrainedConfig"):
        if fault := why_not_shared(size, dist.get_world_size(), config):
            raise ValueError(fault)
        self.size = size
        self.processes, _ = dist.new_subgroups(group_size=size)

    def own(self, packed: Packed) -> Packed:
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
        return Packed(ids, positions, starts, packed.tree.with_padding(padding), predicting, targets, places)


class Cutter:
    """Cuts batches for one model.

    Args:
        forward: says whether the model takes packed rows and shared prompts.
        sequences: the processes that share each sequence, if there are several.
        least_gain: as `ModelConfig.least_gain`.
        device: where the micro-batches go.
    """

    def __init__(self, forward: Forward, sequences: SequenceGroup | None, least_gain: float, device: torch.device):
        self._forward, self._sequences, self._device = forward, sequences, device
        self._wanted_gain = least_gain

    @cached_property
    def _least_gain(self) -> float:
        return self._wanted_gain if self._wanted_gain < NEVER and self._forward.shares_prefixes else NEVER

    @property
    def shares_prompts(self) -> bool:
        """Whether rows with equal prompts can be computed with one copy of the prompt."""
        return self._least_gain < NEVER

    @property
    def copies(self) -> int:
        """Number of processes that have the same rows."""
        return 1 if self._sequences is None else self._sequences.size

    def micro_batches(self, batch: Batch, micro: MicroBatchRule) -> Iterator[MicroBatch]:
        """Yield this process's rows on the device. All processes yield equally many micro-batches; empty ones are dummies."""
        lengths, packs = row_lengths(batch), self._forward.packs
        groups = groups_of(batch, lengths, self._least_gain)
        if micro.tokens is not None:
            micro = MicroBatchRule(tokens=micro.tokens * self.copies)
        count, most = 0, 1
        while count < most:  # on all processes together
            count = most
            parts = cut(lengths, micro, packs, count, groups)
            most = self._most(len(parts))
        for rows in parts:
            part = pack(batch, rows, lengths, self._least_gain) if packs else take(batch, rows, lengths)
            if self._sequences is not None and part.packed is not None:
                part = part._replace(packed=self._sequences.own(part.packed))
            yield part.to(self._device)

    def _most(self, count: int) -> int:
        """Return the largest count of any process."""
        if dist.get_world_size() == 1:
            return count  # without waiting for the device
        largest = torch.tensor(count, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)
