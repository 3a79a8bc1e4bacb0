"""Ray: joining or starting it, placement of processes, worker groups, and the first cause of errors."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def stay_on_this_machine() -> None:
    """Let a Ray that starts here listen on the loopback interface only.

    Call it before Ray is imported, because Ray reads the variable then. The variable also works on Linux, despite its name:
    Windows and macOS are the systems on which 0 is Ray's default.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@contextmanager
def without_collection() -> Iterator[None]:
    """Import without garbage collections, which take one of the five seconds that torch and transformers need."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
