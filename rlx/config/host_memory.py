"""The memory of this machine or container. A leaf: it imports nothing of rlx."""

from pathlib import Path
from typing import NamedTuple

import psutil

# Share of all memory; with less than this available memory is short. Ray's own limit is 0.05.
SHORT_SHARE = 0.2

# Files with a container's limit and use, in version 2 and 1 of the kernel's control groups. The third file names file cache
# that the kernel can drop, which does not count as used.
CONTAINER_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """Memory that processes here can still take, and all of it [bytes]."""

    available_bytes: int
    total_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether other processes may soon need memory that is kept for later."""
        return self.available_bytes < SHORT_SHARE * self.total_bytes


def host_memory(groups: Path = CONTROL_GROUPS) -> HostMemory:
    """The machine's memory, or the container's where that has less left.

    Args:
        groups: where the kernel shows the control group of this process.
    """
    return min(_memories(groups), key=lambda memory: memory.available_bytes / memory.total_bytes)


def all_host_bytes(groups: Path = CONTROL_GROUPS) -> int:
    """All memory that a process here could have [bytes]: the machine's, or what its container may use."""
    return min(memory.total_bytes for memory in _memories(groups))


def _memories(groups: Path) -> list[HostMemory]:
    machine = psutil.virtual_memory()
    found = [HostMemory(machine.available, machine.total)]
    for limit, usage, stat, cache in CONTAINER_FILES:
        if (groups / limit).is_file():
            total = (groups / limit).read_text().strip()
            # "max" in version 2 and a number beyond any machine in version 1 mean no limit.
            if total != "max" and int(total) < machine.total:
                figures = dict(line.split() for line in (groups / stat).read_text().splitlines())
                used = int((groups / usage).read_text()) - int(figures.get(cache, 0))
                found.append(HostMemory(max(0, int(total) - used), int(total)))
    return found
