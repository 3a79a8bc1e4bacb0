"""Measures the time from the notice of a failure to the next row of metrics."""

import json
import threading
import time
from pathlib import Path

RESTART = "rlx restart "
POLL_S = 0.1


class Clock:
    """Follows one run through all its commands; a context.

    Args:
        folder: `trainer.default_local_dir`.
        log: output of the command.

    Attributes:
        lost_s: of each failure that a row followed, from its notice to that row. A notice without a row before the next one
            counts from the first of them.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self.lost_s: list[float] = []
        self._folder, self._log = folder, log
        self._read, self._last = 0, b""
        self._noticed: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> "Clock":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self.look()
        self.look()

    def notice(self) -> None:
        """A failure is known now, because the command is given again."""
        self._noticed = self._noticed or time.time()

    def look(self) -> None:
        """Take in new lines of the log and new rows."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        if RESTART.encode() in self._last + new:
            self.notice()
            self._last = b""
        else:
            self._last = new[-len(RESTART) + 1 :]
        if self._noticed is not None and (row_s := self._time_of_last_row()) > self._noticed:
            self.lost_s.append(row_s - self._noticed)
            self._noticed = None

    def _time_of_last_row(self) -> float:
        files = sorted(self._folder.glob("*/metrics.jsonl"))
        lines = files[-1].read_bytes().split(b"\n")[:-1] if files else []
        return float(json.loads(lines[-1])["time"]) if lines else 0.0
