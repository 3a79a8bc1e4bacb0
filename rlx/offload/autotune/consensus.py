"""The profiles that ranks plan with: those they have measured, and cached ones whose bytes they have checked.

Note [cached profiles]
The cache key describes layers, device and versions. They determine the times, but not all bytes: the memory of the loss, for
example, is charged to a layer, and no key describes a loss. So a run compares bytes before it plans with cached profiles. It
profiles even its first pass, which warms up, and uses only the bytes of that pass. Each rank compares its own passes with the
cached profiles of the same lengths:

- All bytes agree to `_ALIKE`: the rank accepts the cache. Plans use the cache once all ranks have accepted it.
- The bytes of the warm-up pass differ: kernels may have taken memory when they first ran. The next pass is measured and compared.
- The bytes of a measured pass differ on any rank: all ranks ignore the cache for the rest of the run, and write it anew.

Accepted bytes are multiplied by the largest ratio that any rank has found (1.0 to 1.1). So a plan from the cache assumes at
least the bytes that this run has measured. The budget is never cached: each run measures free memory and the rate of the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from rlx.offload.autotune.length_bucket import Key
from rlx.offload.autotune.pass_profile import PassProfile, slowest
from rlx.offload.autotune.step_limits import Limits
from rlx.offload.plan.costs import LayerCost

_ALIKE = 1.1  # bytes of equal runs differ by less; they differ by the copies in flight when memory is read
_BYTES = [field.name for field in fields(LayerCost) if field.name.endswith("bytes")]


class RankReport(NamedTuple):
    """The profiles and limits that one rank has found since its last report."""

    measured: Mapping[Key, PassProfile]
    warm_up: Mapping[Key, PassProfile]  # of the pass that warmed up; only their bytes are used
    cached: Mapping[Key, PassProfile]  # the first rank reads them for all ranks
    limits: Limits


class Consensus:
    """The state that follows from all ranks' reports. All ranks get the same reports, so all have the same state."""

    def __init__(self) -> None:
        self.cached: dict[Key, PassProfile] = {}  # from the first rank, with the bytes in the file
        self.is_refuted = False  # a measured pass had other bytes than the cache
        self._accepting: set[int] = set()  # ranks whose bytes agree with the cache
        self._is_accepted = False
        self._ratio = 1.0

    def join(self, reports: Sequence[RankReport]) -> dict[Key, PassProfile]:
        """Compare new profiles of all ranks with the cache, and return the slowest measured profile of each length."""
        if not self.is_refuted:
            self.cached |= reports[0].cached
        for rank, report in enumerate(reports):
            for key, own in (*report.warm_up.items(), *report.measured.items()):
                if key not in self.cached:
                    continue
                ratio = bytes_ratio(own, self.cached[key])
                if ratio is not None:
                    self._accepting.add(rank)
                    self._ratio = max(self._ratio, ratio)
                elif key in report.measured:
                    self.is_refuted = True
        if self.is_refuted:
            self.cached.clear()
        self._is_accepted = len(self._accepting) == len(reports)
        keys = sorted({key for report in reports for key in report.measured})
        return {key: slowest([report.measured[key] for report in reports if key in report.measured]) for key in keys}

    def accepted(self) -> dict[Key, PassProfile]:
        """Return the cached profiles with their bytes multiplied; none before all ranks have accepted them."""
        if not self._is_accepted:
            return {}
        return {key: _with_larger_bytes(profile, self._ratio) for key, profile in self.cached.items()}

    def is_new(self, key: Key, profile: PassProfile) -> bool:
        """Return whether to write a measured profile: the cache has none of this length, or one with shorter inputs."""
        return key not in self.cached or longest_input_bytes(profile) > longest_input_bytes(self.cached[key])


def bytes_ratio(own: PassProfile, cached: PassProfile) -> float | None:
    """Return the ratio by which the bytes of a pass exceed those of a cached profile, at least 1; None: they do not agree.

    They agree if both have the same layers with the same operations, and all bytes differ by at most the ratio of the inputs'
    lengths times `_ALIKE`. Times are not compared, nor are the operations to plan, which depend on times.
    """
    layers, others = ([(kind.members, kind.names, kind.flow) for kind in profile.kinds] for profile in (own, cached))
    if layers != others:
        return None
    pairs = [(own.loss_bytes, cached.loss_bytes)]
    for kind, other in zip(own.kinds, cached.kinds, strict=True):
        pairs += [(getattr(kind.cost, name), getattr(other.cost, name)) for name in _BYTES]
    length = longest_input_bytes(own) / max(longest_input_bytes(cached), 1)
    shorter, longer = min(1.0, length), max(1.0, length)
    if not all(theirs * shorter / _ALIKE <= mine <= theirs * longer * _ALIKE for mine, theirs in pairs):
        return None
    return max(1.0, *(mine / max(theirs * longer, 1) for mine, theirs in pairs))


def longest_input_bytes(profile: PassProfile) -> int:
    """Return the largest inputs of any layer [bytes]."""
    return max((kind.cost.boundary_bytes for kind in profile.kinds), default=0)


def _with_larger_bytes(profile: PassProfile, ratio: float) -> PassProfile:
    def larger(figures: Mapping[str, Any]) -> dict[str, Any]:
        return {name: round(value * ratio) for name, value in figures.items() if name.endswith("bytes")}

    kinds = []
    for kind in profile.kinds:
        operations = tuple(replace(one, **larger(vars(one))) for one in kind.cost.operations)
        points = tuple(point._replace(**larger(point._asdict())) for point in kind.cost.points)
        cost = replace(kind.cost, operations=operations, points=points, **larger(vars(kind.cost)))
        kinds.append(kind._replace(cost=cost))
    return profile._replace(kinds=tuple(kinds), loss_bytes=round(profile.loss_bytes * ratio))
