"""The argument that every rule takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlx.config.faults import Fault
from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import LEAVES, as_text, value_at
from rlx.config.secrets import without_secrets

Faults = Iterator[Fault]


@dataclass(frozen=True)
class CheckContext:
    """A configuration on a machine."""

    config: PPOConfig
    set_keys: frozenset[str]  # dotted names of the keys that the user set
    machine: Machine

    def value(self, key: str) -> Any:
        return value_at(self.config, key)

    @property
    def changed_keys(self) -> list[str]:
        """Return the keys that the user set to another value than the default, in the tree's order."""
        return [key for key, leaf in LEAVES.items() if key in self.set_keys and self.value(key) != leaf.default]

    @property
    def on_accelerator(self) -> bool:
        return on_accelerator(self.config, self.machine)

    def fault(self, what: str, expected: str, remedy: str, *keys: str, got: str = "") -> Fault:
        """Return a fault of these keys; it shows their values unless `got` says more."""
        got = got or ", ".join(f"{key}={as_text(without_secrets(self.value(key)))}" for key in keys)
        return Fault(what, got, expected, remedy, keys)
