"""When the host memory in which activations waited goes back to the system.

Note [host memory between updates]
After an update the activations have left the arena of the offloading engine, which stays reserved; parameters and
optimizer states that are to wait on the host move in, and what room is left waits for the next update. Giving that back
and taking it anew is not free: page-locking costs 0.4 s per GiB (one H200 machine), in every step. Keeping it while
others run short costs more: during the rollout what is parked, the sampler and the reward functions share the host, and
Ray kills workers once 95 % of it is in use. So it is given back before the rollout, once all roles rest, and only when
little is left.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

from rlx.offload import host_arena, trim

logger = logging.getLogger(__name__)

# Share of all memory; with less than this available memory is short. Ray's own limit is 0.05.
SHORT_SHARE = 0.2

# What a container may use and uses, in version 2 and 1 of the kernel's control groups; file cache that can go is named
# in the third file and is not in use.
CONTAINER_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class HostMemory(NamedTuple):
    """Memory that processes here can still take, and all of it [bytes]."""

    available_bytes: int
    total_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether others may soon need what is kept for later."""
        return self.available_bytes < SHORT_SHARE * self.total_bytes


def host_memory(groups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """The machine's memory, or the container's where that has less left.

    Args:
        groups: where the kernel shows the control group of this process.
    """
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
    return min(found, key=lambda memory: memory.available_bytes / memory.total_bytes)


class HostRelief:
    """Returns to the system what the offloading engine keeps for the next update, where memory is short."""

    def __init__(self) -> None:
        self._has_told = False

    def relieve(self, memory: HostMemory) -> int:
        """Gives back what waits for nothing, if `memory` is short; returns how many bytes of the host that were."""
        if not memory.is_short:
            return 0
        freed = trim()
        if freed and not self._has_told:
            self._has_told = True
            logger.info(
                "host memory is short (%.1f of %.1f GB available): the %.1f GB in which activations waited are given back "
                "before each rollout and taken anew in the next update, which costs time; "
                "activation_offload.max_host_bytes limits them",
                memory.available_bytes / 1e9,
                memory.total_bytes / 1e9,
                freed / 1e9,
            )
        return freed


def host_use() -> dict[str, int]:
    """What this process keeps in host memory for what leaves the device [bytes].

    Returns:
        held now, page-locked or not, by the names of those who hold something; and `reserved`, taken from the system for
        all of them.
    """
    arenas = [host_arena(pinned) for pinned in (False, True)]
    held = sum((Counter(arena.holders()) for arena in arenas), Counter())
    return {"reserved": sum(arena.reserved_bytes for arena in arenas), **+held}
