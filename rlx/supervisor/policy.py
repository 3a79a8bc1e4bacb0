"""Decide whether a run whose driver ended is started again. Pure functions."""

from collections.abc import Sequence
from typing import NamedTuple


class End(NamedTuple):
    """The end of a driver that had not finished.

    Args:
        reason: one line.
        step: the step in which it ended; 0: before the first.
        error: what is equal when the same error comes again, such as "OutOfMemoryError in actor.update"; empty if something
            was lost: a process, a node, a connection.
        curable: whether another attempt may end otherwise; False for a mistake in the user's code or data.
    """

    reason: str
    step: int
    error: str = ""
    curable: bool = True


def refusal(ends: Sequence[End], most: int) -> str | None:
    """Return why the run is not started again after the last of its ends, or None if it is.

    Args:
        ends: all so far, the oldest first.
        most: `trainer.max_restarts`.
    """
    *before, last = ends
    if not last.curable:
        return "a restart would end the same way"
    if last.error and any((end.step, end.error) == (last.step, last.error) for end in before):
        return f"the same error came twice in step {last.step}, so another restart would end the same way"
    if len(before) >= most:
        return f"no restart is left (trainer.max_restarts={most})" if most else "trainer.max_restarts=0"
    return None
