"""A leaf: what the user calls rlx's commands, `rlx export` or `python -m rlx.export`, so that messages name what works."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

CALLED_AS = "RLX_CALLED_AS"
"""The environment variable with the command line's first words, such as `rlx train`; without it the module was run."""
MODULES = {
    "train": "rlx.main_ppo",
    "check": "rlx.main_ppo --check",
    "eval": "rlx.trainer.evaluate",
    "export": "rlx.export",
    "report": "rlx.trainer.report",
    "gsm8k": "rlx.data.gsm8k",
    "serve": "rlx.serve",
    "view": "rlx.view",
}


def program(command: str) -> str:
    """Return how to call a command here: `rlx export` if this process is a command of `rlx`, else `python -m rlx.export`."""
    called = os.environ.get(CALLED_AS)
    return f"{called.rpartition(' ')[0]} {command}" if called else f"python -m {MODULES[command]}"


def beside_python(name: str) -> str:
    """Return the name of a program of this environment, or its path where a shell does not find it by its name."""
    path = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not path.exists() else shlex.quote(str(path))


def continuing(checkpoint: Path, overrides: Sequence[str], *more: str) -> str:
    """Return the command that continues a run from a checkpoint, with `more` overrides than the run's own."""
    changed = ("trainer.resume_", *(f"{each.partition('=')[0]}=" for each in more))
    given = [each for each in overrides if not each.startswith(changed)]
    where = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    return f"{program('train')} {shlex.join([*given, *where, *more])}"
