"""User code inside its process: load it, limit its calls, note whose call is at work, and shorten tracebacks."""

import asyncio
import base64
import contextlib
import inspect
import os
import pickle
import reprlib
import signal
import traceback
import types
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlx.user_code import IMPORTING, TooLong, UserCodeError

LONGEST_TEXT = 10_000
"""Longest description or traceback of a failure to keep [characters]; the end of a traceback remains."""
USER_FILES = "RLX_USER_FILES"
"""Environment variable: the loaded files, which processes started by multiprocessing need; see `rlx.processes.main`."""
number_at_work: ContextVar[int] = ContextVar("number_at_work", default=0)
"""Number of the request that a task works for; 0: none."""
note_descriptor = -1
"""Of the file in which the owner reads whose code was at work when this process ended; `rlx.processes.main` sets it."""


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return self.repr_instance(x, level)  # which holds the error of a number with too many digits


_short = _Repr()
_short.maxstring = _short.maxother = 200
in_short = _short.repr
"""Returns what `repr` does, of a long value a part."""


def loaded(number: int, content: str) -> tuple[Any, Any, list[Any]]:
    """Load what the owner's `IsolatedProcess.load` sent; return it, the code (None if it cannot be loaded) and the reply."""
    code = pickle.loads(base64.b64decode(content))
    try:
        made = code.load()
    except UserCodeError as fault:
        trace = own_traceback(fault.__cause__, IMPORTING) if fault.__cause__ else ""
        return code, None, ["loaded", number, False, type(fault).__name__, str(fault), trace]
    file = Path(code.source).expanduser().absolute()
    if file.is_file():
        known = filter(None, os.environ.get(USER_FILES, "").split(os.pathsep))
        os.environ[USER_FILES] = os.pathsep.join(dict.fromkeys((*known, str(file))))
    return code, made, ["loaded", number, is_async(made), "", "", ""]


def is_async(function: Any) -> bool:
    """Whether a call returns an awaitable, also for an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@contextlib.contextmanager
def at_work(limit_s: float = 0.0, waiting_counts: bool = False) -> Iterator[None]:
    """Note whose code runs. Raise TooLong if it uses the processor, or with `waiting_counts` takes, longer; 0: never.

    The signal comes again until the block ends, because an exception in a callback of C code is lost. Code in C that never
    returns to Python is not interrupted. The limit works in the main thread alone.
    """
    _write(number_at_work.get())
    timer = signal.ITIMER_REAL if waiting_counts else signal.ITIMER_PROF
    try:
        if limit_s:
            signal.signal(signal.SIGALRM if waiting_counts else signal.SIGPROF, _interrupt)
            signal.setitimer(timer, limit_s, 0.1)
        yield
    finally:
        if limit_s:
            signal.setitimer(timer, 0)
        _write(0)


def _interrupt(_: int, frame: types.FrameType | None) -> None:
    # Raised on the way into `at_work` or out of it, the error would leave the timer on: this comes again if the block goes on.
    if frame and (frame.f_code is inspect.unwrap(at_work).__code__ or frame.f_code.co_filename == contextlib.__file__):
        return
    raise TooLong


def _write(number: int) -> None:
    with contextlib.suppress(OSError):  # a full disk, or no owner; without a note no call is to blame
        os.pwrite(note_descriptor, number.to_bytes(8, "little"), 0)


async def limited(limit_s: float | None, busy_s: float, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function, async or not. Raises TooLong after `limit_s`, also where the call swallows its cancellation; None: never.

    Python code that computes for `busy_s` without waiting is interrupted; 0: never.
    """
    with at_work(busy_s, waiting_counts=True):
        result = call(*arguments, **named)
    if not inspect.isawaitable(result):
        return result
    coroutine = result if inspect.iscoroutine(result) else _awaited(result)
    task = asyncio.ensure_future(_noted(coroutine, busy_s))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        if not done:
            raise TooLong
    except BaseException:
        task.cancel()
        raise
    value, fault = task.result()
    if fault is not None:
        raise fault
    return value


async def _awaited(waiting: Awaitable[Any]) -> Any:
    return await waiting


@types.coroutine
def _noted(coroutine: Coroutine[Any, Any, Any], limit_s: float) -> Generator[Any, Any, tuple[Any, Any]]:
    """Await a coroutine, each of whose steps is `at_work`; return its value or error. SystemExit would end the event loop."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        with at_work(limit_s, waiting_counts=True):
            try:
                waits_for = resume(value)
            except StopIteration as end:
                return end.value, None
            except asyncio.CancelledError:
                raise
            except BaseException as fault:
                return None, fault
        try:
            value = yield waits_for
            resume = coroutine.send
        except BaseException as fault:
            resume, value = coroutine.throw, fault


def own_traceback(fault: BaseException, callers: Collection[str] = (), longest: int = LONGEST_TEXT) -> str:
    """Return the traceback of an error as Python prints it, without the frames of this file and of the files `callers`.

    It is empty if no frame is left, as with a call whose arguments do not fit.
    """
    whole = traceback.TracebackException.from_exception(fault)
    open_ones, frames = [whole], 0
    while open_ones:
        told = open_ones.pop()
        own = [each for each in told.stack if each.filename not in (__file__, *callers)]
        told.stack = traceback.StackSummary.from_list(own)
        frames += len(own)
        open_ones += filter(None, (told.__cause__, told.__context__, *(told.exceptions or ())))
    return "".join(whole.format())[-longest:] if frames else ""
