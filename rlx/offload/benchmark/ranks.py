"""Communication between the processes of a benchmark, or of one process with itself."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Ranks:
    """The processes that run the same steps: of a group with a backend for host memory, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.is_first = group is None or dist.get_rank(group) == 0

    def say(self, text: str) -> None:
        """Print a line, on the first process only."""
        if self.is_first:
            print(text, flush=True)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._group is not None:
            dist.barrier(self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
