"""The profiles that ranks plan with: what each has measured, and cached profiles once their bytes have been found right.

Note [cached profiles]
The cache key names what times follow from: layers, device, versions. Bytes follow from more. The loss, for example, is no
module that a key could describe, and its memory is part of what a layer is charged with. So a run compares bytes first. Its
first pass, which warms up, is profiled like a measured one. Its times say nothing, but its bytes count. Each rank compares
its own passes with the cached profiles of the same lengths:

- All bytes agree to `_ALIKE`: the rank accepts the cache. It is used once all ranks have accepted it.
- The bytes of the warm-up pass differ: kernels may have taken memory when they first ran. The next pass is measured and compared.
- The bytes of a measured pass differ on any rank: all ranks ignore the cache for the rest of the run, and write it anew.

Accepted bytes are multiplied by the largest ratio that any rank has found (1.0 to 1.1). So a cached plan never counts on
less memory than one that this run has measured. The budget is never cached: free memory and the rate of the link are
measured in each run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from rlx.offload.autotune.length_bucket import Key
from rlx.offload.autotune.pass_profile import PassProfile, slowest
from rlx.offload.plan.costs import LayerCost

_ALIKE = 1.1  # bytes of two equal runs differ by less: copies that are in flight when memory is read


class Limits(NamedTuple):
    """What one rank has to spend; None: it does not know, or has no limit."""

    link_bytes_per_s: float | None
    device_bytes: int | None
    host_bytes: int | None
    disk_bytes_per_s: float | None


class RankReport(NamedTuple):
    """What one rank has found since the last report.

    Args:
        measured: profiles of measured passes.
        warm_up: profiles of the pass that warmed up; only their bytes count.
        cached: profiles from the cache. The first rank reads it for all ranks.
        limits: what the rank has to spend.
    """

    measured: Mapping[Key, PassProfile]
    warm_up: Mapping[Key, PassProfile]
    cached: Mapping[Key, PassProfile]
    limits: Limits


class Consensus:
    """What ranks have made of each other's reports. All ranks get the same reports, so all come to the same state."""

    def __init__(self) -> None:
        self.cached: dict[Key, PassProfile] = {}  # of the first rank, bytes as they were written
        self.is_refuted = False  # a measured pass has other bytes than the cache
        self._accepting: set[int] = set()  # ranks that have found the bytes of the cache right
        self._is_accepted = False
        self._ratio = 1.0

    def join(self, reports: Sequence[RankReport]) -> dict[Key, PassProfile]:
        """Compare new profiles with the cache, and return the slowest measured profile of each length.

        Args:
            reports: of all ranks, in the same order on each.
        """
        if not self.is_refuted:
            self.cached |= reports[0].cached
        for rank, report in enumerate(reports):
            for key, own in (*report.warm_up.items(), *report.measured.items()):
                ratio = bytes_ratio(own, self.cached[key]) if key in self.cached else 1.0
                if ratio is None:
                    self.is_refuted = self.is_refuted or key in report.measured
                elif key in self.cached:
                    self._accepting.add(rank)
                    self._ratio = max(self._ratio, ratio)
        if self.is_refuted:
            self.cached.clear()
        self._is_accepted = len(self._accepting) == len(reports)
        keys = sorted({key for report in reports for key in report.measured})
        return {key: slowest([report.measured[key] for report in reports if key in report.measured]) for key in keys}

    def accepted(self) -> dict[Key, PassProfile]:
        """Return the cached profiles with their bytes multiplied; none before all ranks have accepted them."""
        if not self._is_accepted:
            return {}
        return {key: with_larger_bytes(profile, self._ratio) for key, profile in self.cached.items()}

    def is_new(self, key: Key, profile: PassProfile) -> bool:
        """Return whether a measured profile is to be written: the cache has none, or one of shorter inputs."""
        return key not in self.cached or longest_input_bytes(profile) > longest_input_bytes(self.cached[key])


def bytes_ratio(own: PassProfile, cached: PassProfile) -> float | None:
    """Return by which ratio the bytes of a pass exceed those of a cached profile, at least 1; None: they do not agree.

    They agree if both have the same layers with the same operations, and all bytes differ by no more than the lengths of
    their inputs do, times `_ALIKE`. Times are not compared, nor which operations are worth planning: that follows from times.
    """
    layers, others = ([(kind.members, kind.names, kind.flow) for kind in profile.kinds] for profile in (own, cached))
    if layers != others:
        return None
    pairs = [(own.outside_bytes, cached.outside_bytes)]
    for kind, other in zip(own.kinds, cached.kinds, strict=True):
        pairs += [(getattr(kind.cost, name), getattr(other.cost, name)) for name in _BYTES]
    length = longest_input_bytes(own) / max(longest_input_bytes(cached), 1)
    shorter, longer = min(1.0, length), max(1.0, length)
    if not all(theirs * shorter / _ALIKE <= mine <= theirs * longer * _ALIKE for mine, theirs in pairs):
        return None
    return max(1.0, *(mine / max(theirs * longer, 1) for mine, theirs in pairs))


_BYTES = [field.name for field in fields(LayerCost) if field.name.endswith("bytes")]


def longest_input_bytes(profile: PassProfile) -> int:
    """Return the most bytes that a layer was called with."""
    return max((kind.cost.boundary_bytes for kind in profile.kinds), default=0)


def with_larger_bytes(profile: PassProfile, ratio: float) -> PassProfile:
    """Return a profile with all numbers of bytes multiplied by a ratio."""

    def larger(figures: Mapping[str, Any]) -> dict[str, Any]:
        return {name: round(value * ratio) for name, value in figures.items() if name.endswith("bytes")}

    kinds = []
    for kind in profile.kinds:
        operations = tuple(replace(one, **larger(vars(one))) for one in kind.cost.operations)
        points = tuple(point._replace(nbytes=round(point.nbytes * ratio)) for point in kind.cost.points)
        cost = replace(kind.cost, operations=operations, points=points, **larger(vars(kind.cost)))
        kinds.append(kind._replace(cost=cost))
    return profile._replace(kinds=tuple(kinds), outside_bytes=round(profile.outside_bytes * ratio))
