"""A leaf: counts the progress of this process, so that a watcher can tell slow from stuck.

`beat` is called once per forward of a micro-batch and once per decoded token of a batch. See `rlx/cluster/group.py`.
"""

_beats = 0


def beat() -> None:
    global _beats
    _beats += 1


def beats() -> int:
    return _beats
