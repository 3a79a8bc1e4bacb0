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


def let_idle_threads_sleep() -> None:
    """Let waiting threads of OpenMP sleep soon, here and in processes started here, unless a variable of its says otherwise.

    By default they spin for 3 ms, on cores that other programs could use. A step on two cores took 1.2 s idle and over 45 s beside
    six low-priority programs so, 1.8 s in both without spinning, and 1.3 and 1.7 s with this.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


@contextmanager
def without_collection() -> Iterator[None]:
    """Import without garbage collections, which take one of the five seconds that torch and transformers need."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
