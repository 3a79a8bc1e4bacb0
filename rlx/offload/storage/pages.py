"""Host memory straight from the system, page-locked or not, in any size.

torch's own allocator of page-locked memory rounds each request up to a power of two and, before torch 2.12, gives nothing
back. So on CUDA ordinary pages are registered with the driver instead; other accelerators take torch's.

Note [a forked child and page-locked memory]
Linux copies pages that a driver has pinned at the very fork, a data loader's worker included; so the pages are left out
of children.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref

import torch
from torch import Tensor

logger = logging.getLogger("rlx.offload")

# cudaHostRegisterPortable: page-locked for every device, not only the current one.
_PORTABLE = 1


class Pages:
    """A slab of host memory, given back to the system by `close` or when nothing looks at it any more.

    Args:
        nbytes: its length [bytes].
        is_locked: page-locked, so that copies from and to a device run beside the host.

    Raises:
        OSError: if the system has no memory left.
        RuntimeError: if it refuses to lock it.
    """

    def __init__(self, nbytes: int, is_locked: bool) -> None:
        self._unlock = None
        self.bytes: Tensor
        if is_locked and not torch.cuda.is_available():
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            return
        # Private and anonymous: memory of this process, not a file shared with its children.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(memory, "MADV_HUGEPAGE")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if is_locked:
            _advise(memory, "MADV_DONTFORK")  # Note [a forked child and page-locked memory]
            _register(self.bytes)
            # Holds the pages: they are unlocked before the system has them. A process that ends need not unlock.
            self._unlock = weakref.finalize(self, _unregister, self.bytes)
            self._unlock.atexit = False

    def close(self) -> None:
        """Unlock the pages; no copy may run on them. Their memory goes with the last tensor that looks at it."""
        if self._unlock is not None:
            self._unlock()


def slab_bytes(wanted: int, is_locked: bool) -> int:
    """The longest slab of at most `wanted` bytes of which nothing is lost to rounding."""
    takes_any_size = not is_locked or torch.cuda.is_available()
    return wanted if takes_any_size else 1 << (wanted.bit_length() - 1)


def empty_cache_of_locked_pages() -> None:
    """Make torch give back the page-locked memory that was freed, where pages come from torch and it can."""
    # Public only since torch 2.12.
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
    if empty_host_cache is not None and not torch.cuda.is_available() and torch.accelerator.is_available():
        empty_host_cache()


def _advise(memory: mmap.mmap, name: str) -> None:
    # A kernel built without an advice refuses it; the memory is as good without.
    advice = getattr(mmap, name, None)
    if advice is not None:
        with contextlib.suppress(OSError):
            memory.madvise(advice)


def _register(pages: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(_device_in_use()):
        error = runtime.cudaHostRegister(pages.data_ptr(), pages.nbytes, _PORTABLE)
        if int(error) == 0:
            return
        # The runtime keeps a failed call's code for whoever asks next, which is the next kernel: ask here.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(error)} ({int(error)})")


def _unregister(pages: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostUnregister(pages.data_ptr())
    if int(error) != 0:
        logger.warning("activation offloading: cudaHostUnregister of %d bytes failed (%d)", pages.nbytes, int(error))


def _device_in_use() -> int:
    # Registering makes a context on the current device, which costs memory there: not on one that is not in use.
    devices: list[int] = [torch.cuda.current_device(), *range(torch.cuda.device_count())]
    return next((device for device in devices if torch.cuda.memory_reserved(device)), devices[0])
