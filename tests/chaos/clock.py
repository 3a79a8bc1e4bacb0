"""Measures the time from the notice of a failure to the next row of metrics."""

import json
import re
import threading
import time
from pathlib import Path

RESTART = re.compile(r"^rlx restart \d+ of ", re.MULTILINE)
POLL_S = 0.1


class Clock:
    """Follows one run through all its commands; a context.

    Args:
        folder: `trainer.default_local_dir`.
        log: output of the command.
        faults: that are done to the run.

    Attributes:
        lost_s: of each failure that a row followed, from its notice to that row. A further notice before a row counts as a
            failure of its own only if a further fault was done.
    """

    def __init__(self, folder: Path, log: Path, faults: int = 1) -> None:
        self.lost_s: list[float] = []
        self._folder, self._log, self._faults = folder, log, faults
        self._restarts = 0
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
        """A failure is known now: the driver is started again, or the command is given again."""
        if self._noticed is None or self._faults > 0:
            self._noticed = time.time()
        self._faults -= 1

    def look(self) -> None:
        """Take in new lines of the log and new rows."""
        restarts = len(RESTART.findall(self._log.read_text(errors="replace"))) if self._log.exists() else 0
        if restarts > self._restarts:
            self._restarts = restarts
            self.notice()
        if self._noticed is not None and (row_s := self._time_of_last_row()) > self._noticed:
            self.lost_s.append(row_s - self._noticed)
            self._noticed = None

    def _time_of_last_row(self) -> float:
        files = sorted(self._folder.glob("*/metrics.jsonl"))
        lines = files[-1].read_bytes().split(b"\n")[:-1] if files else []
        return float(json.loads(lines[-1])["time"]) if lines else 0.0
