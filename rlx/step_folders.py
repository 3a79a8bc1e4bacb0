"""The folders `global_step_N` that hold the checkpoints of a run."""

import re
from pathlib import Path


def step_of(folder: Path) -> int | None:
    """Return N of a folder named `global_step_N`, None for another name."""
    match = re.fullmatch(r"global_step_([0-9]{1,18})", folder.name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> dict[int, Path]:
    """Return the folders `global_step_N` inside a folder by N, the earliest first."""
    found = ((step_of(path), path) for path in folder.glob("global_step_*"))
    return dict(sorted((step, path) for step, path in found if step is not None))
