"""Measure the memory of this machine or container. Imports nothing of rlx."""

from pathlib import Path
from typing import NamedTuple

import psutil

# Share of all memory. If less is available, memory is short. Ray's own limit is 0.05.
SHORT_SHARE = 0.2

# Files with a container's limit and use, in versions 2 and 1 of the kernel's control groups. The third file gives the file
# cache; the kernel can drop it, so it does not count as used.
CONTAINER_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """Memory that processes here can still take, and the whole memory [bytes]."""

    available_bytes: int
    total_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether so little is available that reserved memory should be returned to the system."""
        return self.available_bytes < SHORT_SHARE * self.total_bytes


def host_memory(groups: Path = CONTROL_GROUPS) -> HostMemory:
    """Return the memory of the machine, or of the container in /sys if a smaller share of that is available."""
    return min(_memories(groups), key=lambda memory: memory.available_bytes / memory.total_bytes)


def all_host_bytes(groups: Path = CONTROL_GROUPS) -> int:
    """Return the whole memory of the machine, or the container's limit if that is lower [bytes]."""
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
