"""The folders that the driver writes to, and checks of whether it can."""

import os
import re
import tempfile
from pathlib import Path

from rlx.config.schema import PPOConfig


def runs_folder(config: PPOConfig) -> Path:
    """Return the local folder that holds the runs of this experiment; runs with a URL work in the default one."""
    trainer = config.trainer
    given = None if is_url(trainer.default_local_dir) else trainer.default_local_dir
    chosen = given or Path("outputs") / trainer.project_name / trainer.experiment_name
    return Path(chosen).expanduser().absolute()


def is_url(path: str | None) -> bool:
    """Whether a path names a file system by a scheme, such as `s3://bucket/runs`."""
    return path is not None and "://" in path


def warm_starts_folder(config: PPOConfig) -> Path:
    return Path(config.warm_start.cache_dir or "~/.cache/rlx").expanduser().absolute()


def why_not_writable(folder: Path) -> str | None:
    """Return why this process cannot write to a folder, or cannot make it; None if no reason is known."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    try:
        # os.access grants root all that /proc and /sys refuse, so this makes a folder there and removes it.
        os.rmdir(tempfile.mkdtemp(prefix=".rlx-", dir=nearest))
    except PermissionError:
        return f"{nearest} is not writable"
    except OSError as error:
        return f"{nearest} cannot hold a new folder ({error.strerror})"
    return None


def correct_path(key: str) -> str:
    return f"correct {key}; relative paths start at {Path.cwd()}"


def is_python_file(path: str) -> bool:
    return Path(path).suffix == ".py" and Path(path).expanduser().is_file()


def is_hub_name(path: str) -> bool:
    """Whether the path has the form of a hub name; the hub is not asked."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None and not path.startswith(".")
