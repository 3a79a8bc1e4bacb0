"""Ray: joining or starting it, placement of processes, worker groups, and the first cause of errors."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def stay_on_this_machine() -> None:
    """Let a Ray that starts here listen on the loopback interface only.

    Ray reads the variable when it is imported. Its name speaks of two systems on which this is Ray's default; it works on all.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@contextmanager
def without_collection() -> Iterator[None]:
    """Import without garbage collections: of the five seconds that torch and transformers take they would be one."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
