"""Loading what a user wrote, by file and name: a leaf that imports only the standard library."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from rlx.errors import ExplainedError


class UserCodeError(ExplainedError, ValueError):
    """A file of the user's is missing, cannot be imported, or lacks the name asked for."""


def load_name(path: str, name: str, key: str) -> Any:
    """What `name` is in the Python file at `path`.

    Args:
        path: the file; it is imported as a module of its own.
        name: a top-level name in it.
        key: the configuration group that asked, e.g. "custom_reward_function": errors point at its `path` and `name`.

    Raises:
        UserCodeError: no such file, the import fails, or the file has no such name.
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
    except Exception as fault:
        del sys.modules[module_name]
        raise UserCodeError(f"{key}.path: importing {file} failed with {type(fault).__name__}: {fault}") from fault
    if not hasattr(module, name):
        public = sorted(known for known in vars(module) if not known.startswith("_"))
        raise UserCodeError(f"{key}.name: {file} has no {name!r}, it has {public}; correct {key}.name")
    return getattr(module, name)
