"""Errors of a user's code in a process of its own: their traceback, which the owner shows in place of its own."""

import traceback
from collections.abc import Collection


def own_traceback(fault: BaseException, callers: Collection[str], longest: int) -> str:
    """Return the traceback of an error as Python prints it, without rlx's frames around the user's code.

    Args:
        fault: the error, with those that it followed from.
        callers: files whose frames are left out.
        longest: most characters; the end remains, which says where and what.

    Returns:
        The text; empty if no frame is left, as with a call whose arguments do not fit.
    """
    whole = traceback.TracebackException.from_exception(fault)
    open_ones, frames = [whole], 0
    while open_ones:
        told = open_ones.pop()
        told.stack = traceback.StackSummary.from_list([each for each in told.stack if each.filename not in callers])
        frames += len(told.stack)
        open_ones += filter(None, (told.__cause__, told.__context__, *(told.exceptions or ())))
    return "".join(whole.format())[-longest:] if frames else ""
