"""Faults of a configuration, each with its remedy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        what: the key or the combination, and what is wrong with it.
        got: what was found.
        expected: what would be right.
        remedy: what to do.
        keys: dotted names of the keys that the fault is about; a rule about a key that could not be read is dropped.
    """

    what: str
    got: str
    expected: str
    remedy: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}\n     got: {self.got}\nexpected: {self.expected}\n  remedy: {self.remedy}"


class ConfigError(ValueError):
    """A configuration with faults was asked for; the message lists them all."""

    def __init__(self, faults: tuple[Fault, ...]):
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return f"{len(self.faults)} fault(s) in the configuration\n{numbered(self.faults)}"


def numbered(faults: tuple[Fault, ...]) -> str:
    """The faults as a numbered list, one below the other."""
    lines: list[str] = []
    for number, fault in enumerate(faults, start=1):
        first, *rest = str(fault).splitlines()
        lines += [f"{number:3}. {first}", *(f"     {line}" for line in rest)]
    return "\n".join(lines)
