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

from rlx.config.host_memory import HostMemory
from rlx.offload import host_arena, trim

logger = logging.getLogger(__name__)


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
