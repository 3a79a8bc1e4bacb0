"""An unnamed file that holds offloaded bytes: one per process and directory, shared by everything that spills there.

The file has no name (or loses it at once), so that the system removes it with the process, however that ends. It grows in
steps, and reserves the room of each step in the file system before anything is written: a full disk is noticed early. Reads
and writes bypass the page cache if the file system allows it. Each byte is written once and read once, so that caching it
would only evict other pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from torch import Tensor

from rlx.offload.storage.copy_streams import PendingTasks
from rlx.offload.storage.ranges import (
    PAGE_ALIGN_BYTES,
    READER_THREADS,
    Extent,
    RangeAllocator,
    growth_bytes,
    page_aligned,
)

logger = logging.getLogger("rlx.offload")

WRITER_THREADS = 4


class DiskError(OSError):
    """The disk tier's directory cannot be used, is full, or failed to read or write."""


class ExtentFile:
    """An unnamed file in one directory, which must be writable, and the threads that read and write it.

    Args:
        directory: of the file.
        descriptor: of such a file that another process has made and fills; it is closed with this object. None: make one.
    """

    def __init__(self, directory: str | os.PathLike[str], descriptor: int | None = None) -> None:
        self.directory = directory
        self.freed: deque[list[Extent]] = deque()  # appended to on any thread, see Note [who may free an extent]
        self.nbytes = 0  # its size
        self._ranges = RangeAllocator()
        self._lock = threading.Lock()
        self._process = os.getpid()
        if descriptor is None:
            file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
            weakref.finalize(self, file.close)
            self.descriptor = file.fileno()
            self._allow_direct()
        else:
            weakref.finalize(self, os.close, descriptor)
            self.descriptor = descriptor
        # Two pools, for a read may wait for writes: see Note [reads and writes cannot wait for each other].
        self._writers = ThreadPoolExecutor(WRITER_THREADS, "rlx-offload-write")
        self._readers = ThreadPoolExecutor(READER_THREADS, "rlx-offload-read")
        self._unfinished = PendingTasks()

    def allocate(self, nbytes: int) -> list[Extent]:
        """Return extents of `nbytes`, rounded up to `PAGE_ALIGN_BYTES`; DiskError if the file system has no room for them."""
        self._check_process()
        needed = page_aligned(nbytes)
        with self._lock:
            self._settle()
            extents = self._ranges.allocate(needed)
            if extents is None:
                self._grow(needed - self._ranges.usable_bytes(needed))
                extents = self._ranges.allocate(needed)
            assert extents is not None
            return extents

    def submit(self, task: Callable[[], None], writes: bool) -> None:
        """Run a task on a writer thread, or else on a reader thread."""
        self._check_process()
        # If this fails because no thread can be started, a running thread may still take the task: it is not counted then.
        future = (self._writers if writes else self._readers).submit(task)
        self._unfinished.expect()
        future.add_done_callback(lambda _: self._unfinished.done())

    def drain(self) -> None:
        """Wait until no task is queued or running."""
        self._unfinished.wait()

    def write(self, views: Sequence[Tensor], offset: int) -> None:
        """Write host memory to the file, from byte `offset`; lengths and offset are multiples of `PAGE_ALIGN_BYTES`."""
        for view in views:
            left = _bytes_of(view)
            while left:
                written = os.pwrite(self.descriptor, left, offset)
                left, offset = left[written:], offset + written

    def read(self, views: Sequence[Tensor], offset: int) -> None:
        """Read from byte `offset` of the file into host memory."""
        for view in views:
            left = _bytes_of(view)
            while left:
                read = os.preadv(self.descriptor, [left], offset)
                if read == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                left, offset = left[read:], offset + read

    def trim(self) -> int:
        """Wait for all tasks, then empty the file if nothing of it is in use; return how many bytes that freed."""
        self.drain()
        with self._lock:
            self._settle()
            if not self._ranges.remove_free_slabs():
                return 0
            freed, self.nbytes = self.nbytes, 0
            os.ftruncate(self.descriptor, 0)
            return freed

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "offloading to disk was switched on before this process was forked, and threads do not survive a "
                "fork; switch it on in the process that trains"
            )

    def _settle(self) -> None:
        while self.freed:
            self._ranges.free(self.freed.popleft())

    def _grow(self, missing: int) -> None:
        """Extend the file by a growth step or, if the disk has no room for that, by the missing bytes."""
        for more in (growth_bytes(missing, self.nbytes), missing):
            try:
                os.posix_fallocate(self.descriptor, self.nbytes, more)
                break
            except OSError as error:
                failure = error
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    # This file system cannot reserve room. If it is full, a write fails.
                    os.ftruncate(self.descriptor, self.nbytes + more)
                    break
                os.ftruncate(self.descriptor, self.nbytes)
        else:
            raise DiskError(
                failure.errno,
                f"offloading to disk has a file of {self.nbytes} bytes and needs {missing} more "
                f"({failure.strerror}); free disk space, choose another directory, or offload less",
                self.directory,
            ) from failure
        self._ranges.extend(0, more)
        self.nbytes += more

    def _allow_direct(self) -> None:
        """Switch direct I/O on and write a page as a test; if that fails, switch it off and write through the page cache."""
        page = mmap.mmap(-1, PAGE_ALIGN_BYTES)
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self.descriptor, page, 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)
            os.pwrite(self.descriptor, page, 0)
            logger.info("activation offloading: %s has no direct I/O; the page cache is used", self.directory)
        os.ftruncate(self.descriptor, 0)


def _bytes_of(view: Tensor) -> memoryview:
    # The caller keeps the tensor alive while it uses the view.
    return memoryview((ctypes.c_char * view.numel()).from_address(view.data_ptr())).cast("B")


_FILES: weakref.WeakValueDictionary[tuple[int, int, int], ExtentFile] = weakref.WeakValueDictionary()
_FILES_LOCK = threading.Lock()


def extent_file(directory: str | os.PathLike[str]) -> ExtentFile:
    """Return this process's file in a directory; DiskError if none can be created there on the first call."""
    with _FILES_LOCK, usable(directory):
        folder = os.stat(directory)
        key = (os.getpid(), folder.st_dev, folder.st_ino)
        file = _FILES.get(key)
        if file is None:
            file = _FILES[key] = ExtentFile(directory)
        return file


@contextmanager
def usable(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a DiskError with the remedy if no file can be made in a directory."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            error.errno,
            f"offloading to disk cannot use the directory ({error.strerror}); expected a folder that "
            "exists, is writable and has room. Create it, or choose another directory",
            directory,
        ) from error


def extent_files() -> list[ExtentFile]:
    """Return all files of this process; a parent process has its own."""
    with _FILES_LOCK:
        return [file for (process, _, _), file in _FILES.items() if process == os.getpid()]
