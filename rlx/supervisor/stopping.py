"""SIGTERM in the driver: end at once, or after the step and a checkpoint."""

import signal
import threading
import time
from types import FrameType


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is no Exception, so that nothing treats it as a failure."""


class Stopping:
    """Notes SIGTERM and Ctrl-C while it is entered; a context.

    Ctrl-C, and SIGTERM with `save_s` of 0, raise at once. Otherwise SIGTERM leaves `left_s` seconds for the end of the step and
    a checkpoint. A second signal raises in any case. Outside the main thread, where Python takes no signals, it does nothing.

    Args:
        save_s: `trainer.save_on_sigterm_s` [s].
    """

    def __init__(self, save_s: float) -> None:
        self._save_s = save_s
        self._deadline_s: float | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: self._terminate}
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def left_s(self) -> float | None:
        """Seconds left to save and end, or None if nobody asked the run to end."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._save_s == 0 or self._deadline_s is not None:
            raise Terminated
        self._deadline_s = time.monotonic() + self._save_s
