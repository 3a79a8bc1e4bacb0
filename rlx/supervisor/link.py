"""The driver's side: its reports to the supervisor, lines of JSON through a pipe, and its end by SIGTERM.

| fact | meaning |
|---|---|
| `max_restarts` | `trainer.max_restarts`; without it the driver has not begun, and is started again only if it was killed |
| `folder` | of the run |
| `scratch` | a folder to remove at the end, unless the run failed |
| `grace_s` | seconds that the driver may take after SIGTERM; with it the driver handles signals |
| `step` | the step that begins |
| `ray` | "starts" or "runs" while the driver has a Ray on this machine, whose processes the supervisor then watches |
| `head` | address of the cluster's head, `host:port` |
| `saved` | the checkpoint written after a signal |
| `end` | the fields of `End` but `step`: why the driver is about to end |
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

DESCRIPTOR = "RLX_SUPERVISOR_PIPE"
FOLDER = "RLX_RUN_FOLDER"
RESTARTS = "RLX_RESTARTS"
OUT_OF_MEMORY = "out of host memory"
"""The error of an end whose process was killed for memory."""

# Taken out of the environment, so that no worker inherits it.
_descriptor = int(os.environ.pop(DESCRIPTOR, "-1"))
if _descriptor >= 0:
    os.set_inheritable(_descriptor, False)


def tell(**facts: Any) -> None:
    """Send facts to the supervisor; without one do nothing."""
    if _descriptor >= 0:
        os.write(_descriptor, json.dumps(facts).encode() + b"\n")


def folder_to_continue() -> str | None:
    """Return the folder of the run that this driver continues, or None if it is the first."""
    return os.environ.get(FOLDER)


def restarts() -> list[str]:
    """Return why the drivers before this one ended, the oldest first."""
    return list(json.loads(os.environ.get(RESTARTS, "[]")))


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is no Exception, so that nothing treats it as a failure."""


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Handle signals so inside a block; outside the main thread, where Python takes none, change nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopping(ExitStack):
    """Notes SIGTERM and Ctrl-C while it is entered; a context.

    Ctrl-C, and SIGTERM with `save_s` of 0, raise at once. Otherwise SIGTERM leaves `left_s` seconds for the end of the step and
    a checkpoint. A second signal raises in any case. Outside the main thread, where Python takes no signals, it does nothing.
    """

    def __init__(self, save_s: float) -> None:
        super().__init__()
        self._save_s = save_s
        self._deadline_s: float | None = None

    def __enter__(self) -> "Stopping":
        handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: self._terminate}
        self.enter_context(handling(handlers))
        return self

    @property
    def left_s(self) -> float | None:
        """Seconds left to save and end, or None if the run was not asked to end."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._save_s == 0 or self._deadline_s is not None:
            raise Terminated
        self._deadline_s = time.monotonic() + self._save_s
