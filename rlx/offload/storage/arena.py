"""Host memory for offloaded bytes: one arena per process for page-locked memory and one for pageable memory.

Activations, parameters and optimizer states of a process share it. Call `trim()` before memory is needed elsewhere; the next step
reserves and page-locks it again, which takes about 0.4 s per GiB.

Note [who may free a host buffer]
The owner of a block may die on any thread while a copy still uses the block. So `Account.free` takes no lock and waits for nothing: it
appends the block, and the event that ends its last copy, to a deque. The next call that allocates or asks for figures frees the blocks
whose event has passed. A call that finds no room waits for the events, oldest first, before it asks the system for memory. So a steady
step reserves none, and no copy runs on a slab that is free as a whole and may be returned.

Note [memory from the system]
torch's allocator of page-locked memory rounds each request up to a power of two, and returns nothing to the system before torch 2.12.
So on CUDA this module registers ordinary pages with the driver instead. Other accelerators use torch's allocator.

Note [a forked child and page-locked memory]
Linux copies pinned pages as soon as the process forks, for a data loader's worker say. So children do not inherit these pages.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections import Counter, deque

import torch
from torch import Tensor

from rlx.offload.storage.ranges import PAGE_ALIGN_BYTES, Extent, RangeAllocator, growth_bytes, page_aligned

logger = logging.getLogger("rlx.offload")

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device, not only the current one


class Pages:
    """A slab of host memory, or of a file from byte `first_byte` on. The system gets it back after `close`, or once no tensor uses it.

    `is_locked`: page-lock it, so that copies from and to a device run asynchronously; RuntimeError if the system refuses.
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
    # The system may lack an advice, or the kernel refuse it. The memory works all the same.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(getattr(mmap, name))


def _register(pages: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(_device_in_use()):
        error = runtime.cudaHostRegister(pages.data_ptr(), pages.nbytes, _PORTABLE)
        if int(error) == 0:
            return
        # The CUDA runtime reports a failed call once more, at the next kernel: here.
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


class Block:
    """Host memory allocated from an arena, in one or several extents."""

    __slots__ = ("_typed", "extents", "nbytes", "reserved_bytes", "views")

    def __init__(self, nbytes: int, extents: list[Extent], views: list[Tensor]) -> None:
        self.nbytes = nbytes
        self.extents = extents
        self.views = views  # uint8, one for each extent; their lengths add up to nbytes
        self.reserved_bytes = sum(extent.length for extent in extents)  # alignment included
        self._typed: Tensor | None = None

    def whole(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return the block as one tensor; None if it has several extents, or another length than the tensor."""
        typed = self._typed
        if typed is None or typed.shape != shape or typed.dtype != dtype:
            if len(self.views) != 1 or self.nbytes != shape.numel() * dtype.itemsize:
                return None
            self._typed = typed = self.views[0].view(dtype).view(shape)  # kept: steps repeat
        return typed

    def pairs(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split a contiguous tensor as the block is, which may end with padding; return pairs (part of the tensor, host memory)."""
        if (whole := self.whole(tensor.shape, tensor.dtype)) is not None:
            return [(tensor, whole)]
        flat, first, pairs = as_bytes(tensor), 0, []
        for view in self.views:
            part = flat[first : first + view.nbytes]
            pairs.append((part, view[: part.nbytes]))
            first += part.nbytes
        return pairs


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


class Account:
    """One user's share of an arena, with a hard cap of `max_bytes`; accounts of one name are one user in `holders`."""

    def __init__(self, arena: HostArena, max_bytes: int | None, name: str) -> None:
        self.arena = arena
        self.max_bytes = max_bytes
        self.name = name
        self._held_bytes = 0
        self._reserved_bytes = 0

    def allocate(self, nbytes: int) -> Block | None:
        return self.arena._allocate(self, nbytes)

    def free(self, block: Block, after: torch.Event | None = None) -> None:
        """Free a block once the event `after`, which ends its last copy, has passed. Callable on any thread; never blocks."""
        self.arena.freed.append((self, block, after))

    @property
    def held_bytes(self) -> int:
        with self.arena._lock:
            self.arena._settle()
            return self._held_bytes


class HostArena:
    """Host memory that grows to about the largest amount ever held; page-locked if `pinned` and if the system allows it."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.max_bytes: int | None = None  # of all accounts together; see `limit`
        self.freed: deque[tuple[Account, Block, torch.Event | None]] = deque()
        self.reserved_bytes = 0  # from the system, now
        self.allocations = 0
        self._awaiting_copies: deque[tuple[Block, torch.Event]] = deque()
        # Free blocks by length, not yet merged with their free neighbours: the next step allocates the same lengths again.
        self._idle: dict[int, list[Block]] = {}
        self._ranges = RangeAllocator()
        self._slabs: dict[int, Pages] = {}
        self._accounts: weakref.WeakSet[Account] = weakref.WeakSet()
        self._has_warned_full = False
        self._lock = threading.Lock()

    def limit(self, max_bytes: int | None) -> None:
        """Cap the memory that the arena reserves for all accounts together [bytes]; None: no cap. `trim` returns memory above it."""
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"HostArena.limit: got {max_bytes} bytes, expected a number >= 0 or None")
        self.max_bytes = max_bytes

    def account(self, max_bytes: int | None = None, name: str = "others") -> Account:
        account = Account(self, max_bytes, name)
        with self._lock:
            self._accounts.add(account)
        return account

    @property
    def held_bytes(self) -> int:
        """Bytes of all allocated blocks, and of freed ones that a copy still uses, with their alignment."""
        with self._lock:
            self._settle()
            self._merge_idle()
            return self.reserved_bytes - self._ranges.free_bytes

    def holders(self) -> dict[str, int]:
        with self._lock:
            self._settle()
            held: Counter[str] = Counter()
            for account in self._accounts:
                held[account.name] += account._held_bytes
            return held

    def _allocate(self, account: Account, nbytes: int) -> Block | None:
        needed = page_aligned(nbytes)
        with self._lock:
            if self.freed or self._awaiting_copies:
                self._settle()
            if account.max_bytes is not None and account._reserved_bytes + needed > account.max_bytes:
                return None
            idle = self._idle.get(nbytes)
            block = idle.pop() if idle else self._new_block(nbytes, needed)
            if block is not None:
                account._held_bytes += nbytes
                account._reserved_bytes += needed
            return block

    def trim(self) -> int:
        """Give unused slabs back to the system; return their bytes."""
        with self._lock:
            self._settle()
            while self._awaiting_copies:
                self._wait_for_oldest()
            self._merge_idle()
            freed = 0
            for slab in self._ranges.remove_free_slabs():
                pages = self._slabs.pop(slab)
                freed += pages.bytes.nbytes
                pages.close()
                del pages
            self.reserved_bytes -= freed
        empty_cache_of_locked_pages()
        return freed

    def _settle(self) -> None:
        while self.freed:
            account, block, after = self.freed.popleft()
            account._held_bytes -= block.nbytes
            account._reserved_bytes -= block.reserved_bytes
            if after is None:
                self._idle.setdefault(block.nbytes, []).append(block)
            else:
                self._awaiting_copies.append((block, after))
        while self._awaiting_copies and self._awaiting_copies[0][1].query():
            block = self._awaiting_copies.popleft()[0]
            self._idle.setdefault(block.nbytes, []).append(block)

    def _wait_for_oldest(self) -> None:
        self._awaiting_copies[0][1].synchronize()  # before the block is removed: a wait that fails loses none
        self._ranges.free(self._awaiting_copies.popleft()[0].extents)

    def _merge_idle(self) -> None:
        for blocks in self._idle.values():
            for block in blocks:
                self._ranges.free(block.extents)
        self._idle.clear()

    def _new_block(self, nbytes: int, needed: int) -> Block | None:
        self._merge_idle()
        extents = self._ranges.allocate(needed)
        while extents is None and self._awaiting_copies:
            self._wait_for_oldest()
            extents = self._ranges.allocate(needed)
        if extents is None:
            self._grow(needed)
            extents = self._ranges.allocate(needed)
        return None if extents is None else Block(nbytes, extents, self._views(extents, nbytes))

    def _views(self, extents: list[Extent], nbytes: int) -> list[Tensor]:
        views, left = [], nbytes
        for extent in extents:
            length = min(extent.length, left)
            views.append(self._slabs[extent.slab].bytes[extent.start : extent.start + length])
            left -= length
        return views

    def _grow(self, needed: int) -> None:
        missing = growth_bytes(needed - self._ranges.usable_bytes(needed), self.reserved_bytes)
        caps = [account.max_bytes for account in self._accounts]
        if caps and None not in caps:
            missing = min(missing, sum(cap for cap in caps if cap is not None) - self.reserved_bytes)
        if self.max_bytes is not None:
            missing = min(missing, self.max_bytes - self.reserved_bytes)
        while missing >= PAGE_ALIGN_BYTES:
            size = slab_bytes(missing - missing % PAGE_ALIGN_BYTES, self.pinned)
            pages = self._new_pages(size)
            if pages is None:
                return
            self._slabs[self.allocations] = pages
            self._ranges.extend(self.allocations, size)
            self.allocations += 1
            self.reserved_bytes += size
            missing -= size

    def _new_pages(self, size: int) -> Pages | None:
        try:
            return Pages(size, self.pinned)
        except OSError as error:
            if not self._has_warned_full:
                self._has_warned_full = True
                logger.warning(
                    f"activation offloading: the system has no host memory left for {size} more bytes ({error}). Tensors "
                    "without room stay on the device or are spilled to disk. Lower max_host_bytes"
                )
            return None
        except RuntimeError as error:
            if not self.pinned:
                raise
            self.pinned = False
            logger.warning(
                f"activation offloading: the system refused {size} more bytes of page-locked host memory, "
                f"{self.reserved_bytes} are reserved ({str(error).splitlines()[0]}); pageable memory is used from now on, "
                "whose copies do not overlap compute. Raise the limit of locked memory, or lower max_host_bytes"
            )
            return self._new_pages(size)


_ARENAS: dict[bool, HostArena] = {}
_ARENAS_LOCK = threading.Lock()


def host_arena(pinned: bool) -> HostArena:
    with _ARENAS_LOCK:
        return _ARENAS.setdefault(pinned, HostArena(pinned))
