"""What ranks tell each other where all meet, and the measurements that all plan with then: Note [ranks that agree] in `auto.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlx.offload.autotune.length_bucket import Key
from rlx.offload.autotune.pass_profile import PassProfile, slowest
from rlx.offload.autotune.profile_cache import compared, enlarged, with_larger_bytes


class Means(NamedTuple):
    """What one rank has to spend; None: it does not know, or has no limit."""

    link_bytes_per_s: float | None
    device_bytes: int | None
    host_bytes: int | None
    disk_bytes_per_s: float | None


class Shared(NamedTuple):
    """What one rank tells the others of lengths that are not planned.

    Args:
        measured: what it has measured.
        first: what its first pass came to, of which the bytes count.
        recalled: what earlier runs have measured.
        means: what it has to spend.
        believes: whether it has found that its files hold; None: it has compared nothing, or has none.
    """

    measured: Mapping[Key, PassProfile]
    first: Mapping[Key, PassProfile]
    recalled: Mapping[Key, PassProfile]
    means: Means
    believes: bool | None


class Joint(NamedTuple):
    """What all ranks make of it.

    Args:
        measurements: of each length the longest time and the most bytes of any rank.
        are_files_checked: each rank has found that its files hold, or that what it holds itself is what others' files say.
        are_files_wrong: a rank has found that they do not.
        ratio: by which the bytes of files are enlarged for the ranks that have none.
    """

    measurements: dict[Key, PassProfile]
    are_files_checked: bool
    are_files_wrong: bool
    ratio: float


def join(ranks: Sequence[Shared], were_files_checked: bool = False) -> Joint:
    """What all plan with; the same on each rank.

    Args:
        ranks: in the same order everywhere.
        were_files_checked: an earlier call has found them so.
    """
    believing = [rank for rank in ranks if rank.believes]
    known = _slowest_of([{**rank.recalled, **rank.measured} for rank in believing])
    are_wrong, are_checked, ratio = any(rank.believes is False for rank in ranks), bool(believing), 1.0
    for rank in ranks:
        own = {**rank.first, **rank.measured}
        common = [] if rank.believes else [compared(own[key], known[key]) for key in own.keys() & known.keys()]
        are_wrong = are_wrong or None in common
        are_checked = are_checked and bool(rank.believes or common or were_files_checked)
        ratio = max([ratio, *(found for found in common if found is not None)])
    are_checked = are_checked and not are_wrong
    found: list[dict[Key, PassProfile]] = []
    for rank in ranks:
        recalled = {key: enlarged(written, ratio) for key, written in rank.recalled.items()} if are_checked else {}
        found.append({**recalled, **rank.measured})
    joint = _slowest_of(found)
    for rank in ranks:  # of one without times of its own the bytes count all the same
        for key in joint.keys() & rank.first.keys():
            joint[key] = with_larger_bytes(joint[key], rank.first[key])
    return Joint(joint, are_checked or (were_files_checked and not are_wrong), are_wrong, ratio)


def _slowest_of(found: Sequence[Mapping[Key, PassProfile]]) -> dict[Key, PassProfile]:
    keys = sorted({key for of_rank in found for key in of_rank})
    return {key: slowest([of_rank[key] for of_rank in found if key in of_rank]) for key in keys}
