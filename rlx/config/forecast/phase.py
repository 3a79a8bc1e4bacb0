"""The memory of one phase of a step."""

from typing import NamedTuple

REFUSED_FROM = 1.1  # times the usable memory; measured runs were within 3 % of the formulas (docs/planning.md)


class Phase(NamedTuple):
    """The most memory that one process needs in a phase [bytes]."""

    name: str
    parts: dict[str, float]  # of the peak: others, weights, gradients, optimizer, gathered, working, sampler
    limit: float | None  # of the parts' sum; None: not known
    host: float  # states and activations of all roles in host memory
    host_limit: float | None
    where: str = ""  # the part of the phase that reaches the peak; empty if the phase has one part only
    disk: float = 0.0  # activations on disk
    lacking: float = 0.0  # bytes that the sampler's share lacks for one sequence

    @property
    def peak(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    def fits(self, margin: float = 1.0) -> bool:
        """Whether the phase fits into `margin` times the memory of device, host and sampler."""
        return self.fits_device(margin) and self.fits_host(margin)

    def fits_device(self, margin: float = 1.0) -> bool:
        """Whether the peak fits into `margin` times its limit, and a sequence into that of the sampler's share."""
        has_room = self.limit is None or self.peak <= self.limit * margin
        return has_room and self.lacking <= self.parts.get("sampler", 0.0) * (margin - 1)

    def fits_host(self, margin: float = 1.0) -> bool:
        """Whether `host` fits into `margin` times its limit."""
        return self.host_limit is None or self.host <= self.host_limit * margin
