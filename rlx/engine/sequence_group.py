"""Processes that share sequences: outside attention each computes its part of the tokens."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rlx.engine.micro_batch import Packed
from rlx.models.loading import why_not_shared

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
