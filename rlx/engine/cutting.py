"""Divide each process's rows into micro-batches, as many on every process."""

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist

from rlx.data.batch import Batch
from rlx.engine.forward import Forward
from rlx.engine.micro_batch import MicroBatch, MicroBatchRule, cut, groups_of, pack, row_lengths, take
from rlx.engine.sequence_group import SequenceGroup
from rlx.models.prefix_tree import NEVER


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
            largest = torch.tensor(len(parts), device=self._device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            most = int(largest)
        for rows in parts:
            part = pack(batch, rows, lengths, self._least_gain) if packs else take(batch, rows, lengths)
            if self._sequences is not None and part.packed is not None:
                part = part._replace(packed=self._sequences.own(part.packed))
            yield part.to(self._device)
