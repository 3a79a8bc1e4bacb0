"""Loading what a user wrote, by file and name: a leaf that imports only the standard library."""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlx.errors import ExplainedError, did_you_mean


class UserCodeError(ExplainedError, ValueError):
    """A file of the user's is missing, cannot be imported, lacks the name asked for, or what has the name cannot be used."""


class ImportFailed(UserCodeError):
    """A file of the user's is there, but its import fails."""


class Interface(NamedTuple):
    """How rlx calls what a user wrote.

    Args:
        key: the configuration group whose `path` and `name` say where it is.
        parameters: what it is called with, by position.
    """

    key: str
    parameters: tuple[str, ...]


POLICY_LOSS = Interface(
    "actor_rollout_ref.actor.policy_loss", ("log_probs", "old_log_probs", "advantages", "mask", "settings")
)
DATASET = Interface("data.custom_cls", ("files", "config", "tokenizer", "split"))


def load_callable(path: str, name: str, interface: Interface) -> Callable[..., Any]:
    """The function or class `name` in the Python file at `path`, which takes what it will be called with.

    Raises:
        UserCodeError: as `load_name`, or it cannot be called so.
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
    """Why a function cannot be called with so many arguments and these named ones; None if it can, or Python cannot tell."""
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(named))
    except TypeError as fault:
        return str(fault)
    except ValueError:  # some functions written in C have no signature
        return None
    return None


def load_name(path: str, name: str, key: str) -> Any:
    """What `name` is in the Python file at `path`.

    Args:
        path: the file; it is imported as a module of its own.
        name: a top-level name in it.
        key: the configuration group that asked, e.g. "custom_reward_function": errors point at its `path` and `name`.

    Raises:
        UserCodeError: no such file, the import fails (ImportFailed), or the file has no such name.
    """
    file = Path(path).expanduser().absolute()
    if not file.is_file() or file.suffix != ".py":
        raise UserCodeError(f"{key}.path: got {path!r}, expected an existing Python file (looked for {file})")
    # Under a name of its own in sys.modules, so that its classes can be pickled and cannot shadow a library.
    module_name = f"rlx_user_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as fault:  # a script that ends itself must not end the run without a word
        del sys.modules[module_name]
        lines = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__) if frame.filename == str(file)]
        where = f" (line {lines[-1]})" if lines else ""
        raise ImportFailed(
            f"{key}.path: importing {file} failed with {type(fault).__name__}: {fault}{where}"
        ) from fault
    if not hasattr(module, name):
        public = sorted(known for known in vars(module) if not known.startswith("_"))
        remedy = did_you_mean(name, public, f"correct {key}.name")
        raise UserCodeError(f"{key}.name: {file} has no {name!r}, it has {public}; {remedy}")
    return getattr(module, name)
