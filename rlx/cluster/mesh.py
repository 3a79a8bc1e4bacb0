"""Distribute the shares of a batch over ranks."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Mesh:
    """The distribution of a batch's shares over the ranks of a group.

    Args:
        share_of_rank: for each rank the share it works on; ranks that work on one share together (tensor or sequence parallel)
            have the same number.
        answering_ranks: for each share the rank whose result is used.
    """

    share_of_rank: tuple[int, ...]
    answering_ranks: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, ranks_per_share: int = 1) -> "Mesh":
        """Return a mesh in which neighbouring ranks work together on a share and the first of them answers.

        Raises:
            ValueError: `ranks_per_share` does not divide `world_size`.
        """
        if ranks_per_share < 1 or world_size % ranks_per_share:
            raise ValueError(
                f"{world_size} processes cannot form groups of {ranks_per_share}; "
                "choose a parallel size that divides trainer.nnodes * trainer.n_gpus_per_node"
            )
        return cls(
            tuple(rank // ranks_per_share for rank in range(world_size)), tuple(range(0, world_size, ranks_per_share))
        )

    @property
    def shares(self) -> int:
        """Number of shares."""
        return len(self.answering_ranks)


def share_ranges(rows: int, shares: int) -> list[range]:
    """Return contiguous row ranges whose lengths differ by at most one, longer ones first; some are empty if rows < shares."""
    size, rest = divmod(rows, shares)
    starts = [share * size + min(share, rest) for share in range(shares + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
