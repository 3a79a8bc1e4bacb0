"""Load a user's code by file and name, and limit the time of code. A leaf that imports only the standard library."""

import _thread
import ctypes
import hashlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from rlx.errors import ExplainedError, did_you_mean

IMPORTING = (__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
"""Files whose frames come before those of a user's file in the traceback of an import."""
_Result = TypeVar("_Result")
TEMPLATE_LIMIT_S, TEMPLATE_CHAT_S = 10.0, 0.2  # of a call, and more for each chat: a template is a program of a model


class UserCodeError(ExplainedError, ValueError):
    """A user's file is missing, cannot be imported, or lacks the name; or the object of that name cannot be used."""


class ImportFailed(UserCodeError):
    """The import of a user's file fails."""


class Interface(NamedTuple):
    """How rlx calls a user's code."""

    key: str  # the configuration group whose `path` and `name` locate it
    parameters: tuple[str, ...]  # arguments by position


POLICY_LOSS = Interface(
    "actor_rollout_ref.actor.policy_loss", ("log_probs", "old_log_probs", "advantages", "mask", "settings")
)
DATASET = Interface("data.custom_cls", ("files", "config", "tokenizer", "split"))


def load_callable(path: str, name: str, interface: Interface) -> Callable[..., Any]:
    """Return the function or class `name` in the Python file at `path`, if it takes the interface's arguments.

    Raises UserCodeError as `load_name`, or if it cannot be called with these arguments.
    """
    found = load_name(path, name, interface.key)
    fault = misfit(found, interface.parameters)
    if fault is not None:
        raise UserCodeError(
            f"{interface.key}: {name} in {path} is {found!r}, expected something to call as "
            f"f({', '.join(interface.parameters)}) ({fault})"
        )
    return found  # type: ignore[no-any-return]


def misfit(function: Any, positional: Sequence[str] = (), named: Sequence[str] = ()) -> str | None:
    """Return why a function cannot be called with these arguments; None if it can, or if Python cannot tell."""
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(named))
    except TypeError as fault:
        return str(fault)
    except ValueError:  # some functions written in C have no signature
        return None
    return None


def load_name(path: str, name: str, key: str) -> Any:
    """Return the top-level object `name` in the Python file at `path`, which is imported as a module of its own.

    Errors refer to `path` and `name` of the configuration group `key`. Raises UserCodeError if there is no such file, the
    import fails (ImportFailed), or the file lacks the name.
    """
    module = load_module(path, key)
    if not hasattr(module, name):
        public = sorted(known for known, value in vars(module).items() if _is_own(known, value, module.__name__))
        remedy = did_you_mean(name, public, f"correct {key}.name")
        raise UserCodeError(f"{key}.name: {module.__file__} has no {name!r}, it has {public}; {remedy}")
    return getattr(module, name)


def load_module(path: str, key: str) -> ModuleType:
    """Import the Python file at `path` as a module of its own. Raises UserCodeError as `load_name`."""
    file = Path(path).expanduser().absolute()
    if not file.is_file() or file.suffix != ".py":
        raise UserCodeError(f"{key}.path: got {path!r}, expected an existing Python file (looked for {file})")
    # With a module name of its own, so that its classes can be pickled and it cannot shadow a library.
    module_name = f"rlx_user_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as fault:  # a script that calls sys.exit must not end the run silently
        del sys.modules[module_name]
        line = line_in(path, fault)
        where = f" (line {line})" if line else ""
        raise ImportFailed(
            f"{key}.path: importing {file} failed with {type(fault).__name__}: {fault}{where}"
        ) from fault
    return module


def line_in(path: str, fault: BaseException) -> int | None:
    """Return the innermost line of a user's file that an error passed through; None if it passed through none."""
    file = str(Path(path).expanduser().absolute())
    lines = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def _is_own(name: str, value: Any, module_name: str) -> bool:
    """Return whether a module's name is public and no import: a module, or a class or function that another one defines."""
    is_import = inspect.ismodule(value) or (
        (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__ != module_name
    )
    return not (name.startswith("_") or is_import)


class TooLong(BaseException):
    """A call has used its time. No Exception, so that libraries do not catch it."""


def call_within(limit_s: float, call: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
    """Return what Python code of others gives, such as a model's chat template. Raises TimeoutError if it takes longer.

    Another thread interrupts it, because a signal reaches only the main thread and Ray's workers call from others. Code in C is
    interrupted when it returns to Python.
    """
    # An RLock, because the interruption may come between its acquisition and the block below it.
    thread, lock, ended = threading.get_ident(), threading.RLock(), threading.Event()

    def interrupt() -> None:
        wait_s = limit_s
        while not ended.wait(wait_s):
            with lock:
                if not ended.is_set():
                    _raise_in(thread, TooLong)
            wait_s = 1.0  # again, in case that a library catches the error

    def end() -> None:
        with lock:
            ended.set()
            _raise_in(thread, None)  # one that is under way would arrive in later code

    try:
        try:
            _thread.start_new_thread(interrupt, ())  # 0.2 ms faster than threading.Thread, which waits until it runs
            return call(*arguments, **named)
        finally:
            end()
    except TooLong:
        end()  # it may have come before the first `end` was through
        raise TimeoutError(f"it takes longer than {limit_s:g} s") from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread when it next runs Python code; None: take back one that it has not met yet."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
