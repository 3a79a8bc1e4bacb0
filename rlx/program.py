"""A leaf: rlx's commands, and what the user calls them, `rlx export` or `python -m rlx.export`, so that messages name what works."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CALLED_AS = "RLX_CALLED_AS"
"""The environment variable with the command line's first words, such as `rlx train`; without it the module was run."""


class Command(NamedTuple):
    """One command."""

    module: str  # runs as `__main__`
    help: str  # one line
    arguments: tuple[str, ...] = ()  # come before the user's
    needs: tuple[str, ...] = ()  # packages by the name to import, beside torch
    extra: str = "train"  # of pyproject.toml, which installs them


TRAINING = ("psutil", "hydra", "ray", "transformers", "pyarrow", "rich")
COMMANDS = {
    "train": Command(
        "rlx.main_ppo", "train by PPO, GRPO and related algorithms; without arguments a tiny model", (), TRAINING
    ),
    "check": Command(
        "rlx.driver", "check a configuration and predict its memory; starts nothing", ("--check",), TRAINING
    ),
    "eval": Command("rlx.trainer.evaluate", "measure a trained policy: avg@n and pass@k with intervals", (), TRAINING),
    "export": Command("rlx.export", "write a checkpoint as a Hugging Face folder", (), TRAINING),
    "report": Command("rlx.trainer.report", "draw a run's curves", (), ("matplotlib", "rich")),
    "gsm8k": Command("rlx.data.gsm8k", "fetch GSM8K as training data", (), ("fsspec", "pyarrow", "rich")),
    "plan": Command("rlx.offload.plan", "predict what activation offloading saves and costs"),
    "serve": Command(
        "rlx.serve",
        "serve a trained policy to clients of OpenAI's API",
        (),
        (*TRAINING, "fastapi", "uvicorn"),
        "train,agents",
    ),
    "view": Command("rlx.view", "look at the samples of a run", (), ("rich",)),
}


def program(command: str) -> str:
    """Return how to call a command here: `rlx export` if this process is a command of `rlx`, else `python -m rlx.export`."""
    if called := os.environ.get(CALLED_AS):
        return f"{called.rpartition(' ')[0]} {command}"
    # As a module the check is an option of training
    return "python -m rlx.main_ppo --check" if command == "check" else f"python -m {COMMANDS[command].module}"


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
