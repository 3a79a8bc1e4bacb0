from collections.abc import Callable, Sequence

import pytest

from rlx.config.check.validate import Verdict, check
from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine

Check = Callable[..., Verdict]


@pytest.fixture
def cpu_machine() -> Machine:
    return Machine(gpus=0, cpus=4, packages=frozenset())


@pytest.fixture
def verdict(cpu_machine: Machine) -> Check:
    """The verdict on a command line, on a machine without GPUs unless another is given."""

    def of(overrides: Sequence[str], machine: Machine | None = None) -> Verdict:
        return check(compose(overrides), machine or cpu_machine)

    return of
