"""Faults of a configuration, each with its remedy."""

import re
from dataclasses import dataclass

REMEDY = re.compile(r"(.*?)(?:(?:; |\n\s*remedy: )((?:(?!; |\n\s*remedy: ).)*))?\Z", re.DOTALL)
"""An error's text and, after the last semicolon or in a line of its own, its remedy."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    what: str  # the key or the combination, and what is wrong with it
    got: str  # the value found
    expected: str  # the values that are right
    remedy: str  # an action for the user
    # Dotted names of the keys concerned. `check` drops a rule's fault about a key that could not be read.
    keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: Exception, what: str, expected: str, remedy: str) -> "Fault":
        """Return an explained error as a fault; `remedy` serves if its text has none."""
        got, own = REMEDY.match(str(error)).groups()  # type: ignore[union-attr]  # it always matches
        return cls(what, got, expected, own or remedy)

    def __str__(self) -> str:
        return f"{self.what}\n     got: {self.got}\nexpected: {self.expected}\n  remedy: {self.remedy}"


class ConfigError(ValueError):
    """The caller asked for a configuration that has faults; the message lists them all."""

    def __init__(self, faults: tuple[Fault, ...]):
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return f"{len(self.faults)} fault(s) in the configuration\n{numbered(self.faults)}"


def numbered(faults: tuple[Fault, ...]) -> str:
    lines: list[str] = []
    for number, fault in enumerate(faults, start=1):
        first, *rest = str(fault).splitlines()
        lines += [f"{number:3}. {first}", *(f"     {line}" for line in rest)]
    return "\n".join(lines)
