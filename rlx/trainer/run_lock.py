"""The lock of a run's folder, so that two runs never write into one.

Note [when a lock is stale]: `run.lock` names the process that holds it, and that process touches the file every BEAT_S.
On the same machine a lock is stale once its process has ended. For another host, another container, or the time before a reboot
it is stale once the file has not been touched for STALE_S. Both times are the file server's, so clocks of hosts may differ. A
younger lock is watched until it is touched, or stale. An older one is watched for WATCHED_S, because the server's clock may have
been set meanwhile.

Note [one at a time]: several runs may find the same stale lock, and its holder may wake up and end. Between the look at a lock and
its replacement or removal a run therefore holds `flock` on the folder. On a file system without `flock` two runs may replace a stale
lock at the same moment; the first one then stops at its next row, as a run that slept does.

filelock's `SoftFileLease` is close to this, but it would remove the JSON lock of an older rlx that still runs.

Note [a run that slept]: a run that was stopped for longer than STALE_S may find that another host has taken its folder. It then
stops at its next row, see `RunLock.check`.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rlx.errors import ExplainedError, StorageError, storing
from rlx.identity import machine_identity, start_of

LOCK_FILE = "run.lock"
BEAT_S = 10.0
STALE_S = 60.0
WATCHED_S = 15.0

logger = logging.getLogger(__name__)


class RunLocked(ExplainedError, RuntimeError):
    """Another run holds the folder, or it has taken it, or the folder is gone."""


class RunLock:
    """Holds a run's folder as long as the context lasts. Raises RunLocked if another run holds it, StorageError if it cannot be written.

    Times in seconds: see Note [when a lock is stale].
    """

    def __init__(self, folder: Path, beat_s: float = BEAT_S, stale_s: float = STALE_S, watched_s: float = WATCHED_S):
        self._file, self._stale_s, self._watched_s = folder / LOCK_FILE, stale_s, min(watched_s, stale_s)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        self._own = {"token": uuid.uuid4().hex, "since": since, "host": socket.gethostname()}
        self._own |= {"machine": machine_identity(), "pid": os.getpid(), "started": start_of(os.getpid())}
        stale: tuple[dict[str, Any], float] | None = None
        while not self._taken(stale):
            stale = self._stale()
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(beat_s,), name="run lock", daemon=True)
        self._beats.start()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._beats.join()
        with contextlib.suppress(OSError, StorageError), self._alone():
            if _read(self._file)[0] == self._own:
                self._file.unlink()

    def check(self) -> None:
        """Touch the lock. Raises RunLocked if another run has taken it, or StorageError if it cannot be written any more."""
        with storing(self._file):
            holder, _ = _read(self._file)
            if holder != self._own:
                raise RunLocked(
                    f"{self._file.parent}: {_described(holder)} has taken this run's folder, because this run did not touch "
                    f"its lock for {self._stale_s:g} s; it stops, so that only one run writes there"
                )
            os.utime(self._file)

    def _beat(self, beat_s: float) -> None:
        while not self._ended.wait(beat_s):
            try:
                self.check()
            except ExplainedError as fault:
                logger.error("%s. The run stops when this step ends.", fault)
                return

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """See Note [one at a time]."""
        with storing(self._file):
            folder = os.open(self._file.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _taken(self, stale: tuple[dict[str, Any], float] | None) -> bool:
        """Write the lock, in place of a stale one if that is still there; return whether no other one is there."""
        with self._alone(), storing(self._file):
            try:
                if stale is not None and _read(self._file) == stale:
                    self._file.unlink()
                with self._file.open("x", encoding="utf-8") as file:
                    json.dump(self._own, file)
                    file.flush()
                    os.fsync(file.fileno())
            except (FileExistsError, FileNotFoundError):
                return False
        return True

    def _stale(self) -> tuple[dict[str, Any], float] | None:
        """Return the lock that is there and stale, None if it has just gone. Raises RunLocked if its run is still running."""
        with contextlib.suppress(FileNotFoundError):
            with self._alone():
                found = _read(self._file)
            if self._is_stale(*found):
                return found
            raise RunLocked(
                f"{self._file.parent} belongs to {_described(found[0])}, which still runs; wait for its end or stop it, or "
                "start a run of its own with trainer.resume_mode=disable"
            )
        return None

    def _is_stale(self, holder: dict[str, Any], touched_s: float) -> bool:
        own = self._own
        if holder.get("machine") == own["machine"]:
            return start_of(holder["pid"]) != holder["started"]
        with tempfile.TemporaryFile(dir=self._file.parent) as fresh:
            age_s = os.fstat(fresh.fileno()).st_mtime - touched_s
        wait_until_s = time.monotonic() + min(max(self._stale_s - age_s, self._watched_s), self._stale_s)
        while (left_s := wait_until_s - time.monotonic()) > 0:
            time.sleep(min(1.0, left_s))
            if _read(self._file)[1] != touched_s:
                return False
        return True


def _read(file: Path) -> tuple[dict[str, Any], float]:
    """Return the holder, empty if it cannot be read, and the time at which it touched the lock [s since 1970]."""
    with file.open("rb") as opened:  # reopened, because a network file system then asks its server for the time
        text, touched_s = opened.read(), os.fstat(opened.fileno()).st_mtime
    try:
        holder = json.loads(text)
    except ValueError:
        holder = {}
    return holder if isinstance(holder, dict) else {}, touched_s


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return f"a run whose {LOCK_FILE} cannot be read"
    return f"the run of process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
