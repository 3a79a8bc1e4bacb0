"""The argument that every rule takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlx.config.faults import Fault
from rlx.config.machine import Machine
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import LEAVES, value_at

Faults = Iterator[Fault]


@dataclass(frozen=True)
class CheckContext:
    """A configuration on a machine.

    Args:
        config: the tree.
        set_keys: dotted names of the keys that the user set.
        machine: where the run takes place.
    """

    config: PPOConfig
    set_keys: frozenset[str]
    machine: Machine

    def value(self, key: str) -> Any:
        """Return the value of a dotted key."""
        return value_at(self.config, key)

    @property
    def changed_keys(self) -> list[str]:
        """Return the keys that the user set to another value than the default, in the tree's order."""
        return [key for key, leaf in LEAVES.items() if key in self.set_keys and self.value(key) != leaf.default]
