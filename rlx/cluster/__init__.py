"""Ray: joining or starting it, placement of processes, worker groups, and the first cause of errors."""

import os


def stay_on_this_machine() -> None:
    """Let a Ray that starts here listen on the loopback interface only.

    Ray reads the variable when it is imported. Its name speaks of two systems on which this is Ray's default; it works on all.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
