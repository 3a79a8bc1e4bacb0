"""Folders that the driver writes to, and why it cannot."""

import os
import re
from pathlib import Path

from rlx.config.schema import PPOConfig


def runs_folder(config: PPOConfig) -> Path:
    """The folder that holds the runs of this experiment."""
    trainer = config.trainer
    chosen = trainer.default_local_dir or Path("outputs") / trainer.project_name / trainer.experiment_name
    return Path(chosen).expanduser().absolute()


def warm_starts_folder(config: PPOConfig) -> Path:
    """The folder that holds finished warm starts."""
    return Path(config.warm_start.cache_dir or "~/.cache/rlx").expanduser().absolute()


def why_not_writable(folder: Path) -> str | None:
    """Why nothing can be written to a folder, there or still to be made; None if nothing is known against it."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    # The effective user counts, if the system can check it.
    effective = os.access in os.supports_effective_ids
    is_open = os.access(nearest, os.W_OK | os.X_OK, effective_ids=effective)
    return None if is_open else f"{nearest} is not writable"


def is_hub_name(path: str) -> bool:
    """Whether this may name a model on the hub, which is not asked."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None and not path.startswith(".")
