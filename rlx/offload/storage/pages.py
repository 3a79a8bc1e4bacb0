"""Host memory from the system, page-locked or not, of any size.

torch's allocator of page-locked memory rounds each request up to a power of two. Before torch 2.12 it returns nothing to the
system. So on CUDA this module registers ordinary pages with the driver instead. Other accelerators use torch's allocator.

Note [a forked child and page-locked memory]
Linux copies pages that a driver has pinned as soon as the process forks, for a data loader's worker say. So children do not
inherit these pages.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref

import torch
from torch import Tensor

logger = logging.getLogger("rlx.offload")

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device, not only the current one


class Pages:
    """A slab of host memory. The system gets it back after `close`, or once no tensor uses it.

    Args:
        nbytes: its length [bytes].
        is_locked: page-lock it, so that copies from and to a device run asynchronously.
        file: descriptor of the file whose pages these are, so that other processes can map them too.
        first_byte: of the file from which on they are mapped, a multiple of the page size.

    Raises:
        OSError: if the system has no memory left.
        RuntimeError: if the system refuses to lock the memory.
    """

    def __init__(self, nbytes: int, is_locked: bool, file: int | None = None, first_byte: int = 0) -> None:
        self._unlock = None
        if is_locked and not torch.cuda.is_available() and file is None:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            return
        if file is None:  # private and anonymous: memory of this process, not shared with its children
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED, offset=first_byte)
        _advise(memory, "MADV_HUGEPAGE")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if is_locked:
            _advise(memory, "MADV_DONTFORK")  # Note [a forked child and page-locked memory]
            _register(self.bytes)
            # The finalizer holds the pages, so that they are unlocked before the system gets them. No need to at exit.
            self._unlock = weakref.finalize(self, _unregister, self.bytes)
            self._unlock.atexit = False

    def close(self) -> None:
        """Unlock the pages, on which no copy may run. The last tensor that uses the memory returns it to the system."""
        if self._unlock is not None:
            self._unlock()


def slab_bytes(wanted: int, is_locked: bool) -> int:
    """Return the length of the longest slab of at most `wanted` bytes that the allocator does not round up."""
    takes_any_size = not is_locked or torch.cuda.is_available()
    return wanted if takes_any_size else 1 << (wanted.bit_length() - 1)


def empty_cache_of_locked_pages() -> None:
    """Make torch return freed page-locked memory to the system, if the pages are torch's and this torch can."""
    # Public only since torch 2.12.
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
    if empty_host_cache is not None and not torch.cuda.is_available() and torch.accelerator.is_available():
        empty_host_cache()


def _advise(memory: mmap.mmap, name: str) -> None:
    # A kernel may refuse an advice that it was built without. The memory works all the same.
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
        # The CUDA runtime reports a failed call once more, at the next kernel. Let it do so here.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(error)} ({int(error)})")


def _unregister(pages: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostUnregister(pages.data_ptr())
    if int(error) != 0:
        logger.warning("activation offloading: cudaHostUnregister of %d bytes failed (%d)", pages.nbytes, int(error))


def _device_in_use() -> int:
    # Registering creates a context on the current device, which takes memory there. So choose a device that is in use.
    devices: list[int] = [torch.cuda.current_device(), *range(torch.cuda.device_count())]
    return next((device for device in devices if torch.cuda.memory_reserved(device)), devices[0])
