"""Choose the next prompts: an order that only depends on (seed, epoch), and a position in it."""

from typing import Any

import numpy as np

from rlx.data.files import DataError
from rlx.data.forms import require_prompts
from rlx.data.seeding import seed_for


class PromptSampler:
    """Endless batches of prompt indices, epoch after epoch. The driver owns it and saves it in checkpoints.

    Args:
        size: prompts in the data set.
        batch_size: indices per batch; the rest at the end of an epoch is dropped.
        shuffle: a fresh permutation in each epoch; otherwise 0, 1, 2, …
        seed: of the permutations.
        rows: digest of the prompts; empty if they are of a class of the user's own.

    Raises:
        DataError: batch_size is larger than size.
    """

    def __init__(self, size: int, batch_size: int, shuffle: bool, seed: int, rows: str = ""):
        require_prompts(batch_size, size)
        self._rows = rows
        self._size, self._batch_size, self._shuffle, self._seed = size, batch_size, shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over the prompts."""
        return self._size // self._batch_size

    @property
    def epoch(self) -> int:
        """Number of the pass that the next batch belongs to, from 0."""
        return self._epoch + (self._position + self._batch_size > self._size)

    def next(self) -> list[int]:
        """Return the indices of the next batch, all different."""
        if self._position + self._batch_size > self._size:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        batch = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return [int(index) for index in batch]

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position in plain numbers, and the numbers that its order depends on."""
        rows = {"rows": self._rows} if self._rows else {}
        return {"epoch": self._epoch, "position": self._position, **self._identity(), **rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken, maybe with another batch size. Raises DataError if the order differs."""
        saved = {name: state.get(name) for name in self._identity()}
        if saved != self._identity():
            raise DataError(
                f"the checkpoint's sampler had {saved}, this run has {self._identity()}: it cannot continue in the same "
                "order; use the same data files, data.seed and data.shuffle, or start anew with trainer.resume_mode=disable"
            )
        if self._rows and state.get("rows", self._rows) != self._rows:
            raise DataError(
                f"the training rows differ from those of the checkpoint: got {self._size:,} other rows, expected the same prompts, answers "
                "and data sources in the same order (the names of files may differ); give the rows of before in data.train_files, or "
                "start anew with trainer.resume_mode=disable"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"size": self._size, "shuffle": self._shuffle, "seed": self._seed}

    def _order_of(self, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if not self._shuffle:
            return np.arange(self._size)
        # Sort by raw PCG64 numbers: numpy keeps that stream the same in all versions, but may change its permutations.
        keys = np.random.PCG64(seed_for("prompts", self._seed, epoch)).random_raw(self._size)
        return np.argsort(keys, kind="stable")
