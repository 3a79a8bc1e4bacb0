import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlx.config.check.validate import Verdict, check
from rlx.config.machine import Machine
from rlx.config.schema.tree import LEAVES, is_key

sys.path.insert(0, str(Path(__file__).parent / "check"))
from case_tables import composed  # from the path above

Check = Callable[..., Verdict]


@pytest.fixture
def cpu_machine() -> Machine:
    return Machine(gpus=0, cpus=4, packages=frozenset())


DOTTED = re.compile(r"(?<![\w/.-])[a-z_]\w*(?:\.[a-z_]\w*)+(?![\w/])")
ASSIGNED = re.compile(r"(?<![\w/.\"'-])([a-z_][\w.]*)=(\[[^]]*\]|[^\s;:?,]+)")
CODE = re.compile("`[^`]*`")
FILES = ("md", "py", "json", "jsonl")


@pytest.fixture
def not_whole() -> Callable[[str], list[str]]:
    """Return what a remedy names that is no whole key or group of rlx, and its key=value that do not compose."""

    def of(remedy: str) -> list[str]:
        remedy = CODE.sub("", remedy)
        names = [name for name in DOTTED.findall(remedy) if name.rpartition(".")[2] not in FILES]
        unknown = [name for name in names if not is_key(name) and not any(f"{name}." in leaf for leaf in LEAVES)]
        given = [f"{key}={value}" for key, value in ASSIGNED.findall(remedy)]
        return unknown + [override for override in given if composed(override).faults]

    return of


@pytest.fixture
def verdict(cpu_machine: Machine, not_whole: Callable[[str], list[str]]) -> Check:
    """The verdict on a command line, on a machine without GPUs unless another is given. Its remedies name whole keys."""

    def of(overrides: Sequence[str], machine: Machine | None = None) -> Verdict:
        found = check(composed(*overrides), machine or cpu_machine)
        assert [(fault.remedy, wrong) for fault in found.faults if (wrong := not_whole(fault.remedy))] == []
        return found

    return of
