"""A leaf: counts the progress of this process, so that a watcher can tell slow from stuck.

`beat` is called once per forward of a micro-batch and once per decoded token of a batch. See `rlx/cluster/group.py`.
"""

from collections.abc import Callable

_beats = 0
_at_beat: Callable[[], None] | None = None


def beat() -> None:
    global _beats
    _beats += 1
    if _at_beat is not None:
        _at_beat()


def at_beat(function: Callable[[], None]) -> None:
    """Call a function at each beat from now on, instead of an earlier one; it must be quick."""
    global _at_beat
    _at_beat = function


def beats() -> int:
    return _beats
