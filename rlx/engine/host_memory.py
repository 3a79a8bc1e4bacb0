"""Give host memory of offloaded activations back to the system when it is short.

Note [host memory between updates]
After an update the offloading engine's arena stays reserved but holds no activations. Offloaded parameters and optimizer states
use a part of it; the rest waits for the next update. Returning that rest and reserving it again costs time in every step: 0.4 s
per GiB for pinning (one H200 machine). Keeping it while others run short costs more: during the rollout the offloaded tensors,
the sampler and the reward functions share the host, and Ray kills workers once 95 % of it is in use. So rlx returns the rest
before the rollout, once all roles are offloaded, and only if little memory is left.
"""

import logging
from collections import Counter

from rlx.config.host_memory import HostMemory
from rlx.offload import host_arena, trim

logger = logging.getLogger(__name__)


class HostRelief:
    """Returns the free part of the arenas to the system if host memory is short."""

    def __init__(self) -> None:
        self._has_told = False

    def relieve(self, memory: HostMemory) -> int:
        """Free unused blocks of the arenas if `memory` is short, and return their bytes."""
        if not memory.is_short:
            return 0
        freed = trim()
        if freed and not self._has_told:
            self._has_told = True
            logger.info(
                "host memory is short (%.1f of %.1f GB available): the %.1f GB reserved for activations go back to the system "
                "before each rollout, and the next update allocates them again, which takes time. "
                "activation_offload.max_host_bytes limits them",
                memory.available_bytes / 1e9,
                memory.total_bytes / 1e9,
                freed / 1e9,
            )
        return freed


def host_use() -> dict[str, int]:
    """Return the host memory that this process keeps for offloaded tensors [bytes].

    Returns:
        Bytes held now, pinned or not, by the name of each holder; and `reserved`, taken from the system for all of them.
    """
    arenas = [host_arena(pinned) for pinned in (False, True)]
    held = sum((Counter(arena.holders()) for arena in arenas), Counter())
    return {"reserved": sum(arena.reserved_bytes for arena in arenas), **+held}
