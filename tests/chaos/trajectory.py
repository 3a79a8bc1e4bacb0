"""What two runs must have in common: the rows of metrics.jsonl without times and memory, and the bytes of the last weights."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

VARYING = ("time", "timing_s/", "perf/", "memory/", "reward_process", "reward/retries", "reward/processes")


class Trajectory(NamedTuple):
    """What is left of a run.

    Args:
        rows: of metrics.jsonl, in order, without what varies.
        weights: digest of the actor's weights and optimizer in the last checkpoint.
        validation: digest of each dump of a validation, by step.
    """

    rows: list[dict[str, Any]]
    weights: str
    validation: dict[str, str]


def of_run(folder: Path) -> Trajectory:
    """Read the trajectory of a finished run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saved = sorted(folder.glob("checkpoints/global_step_*"), key=lambda each: int(each.name.rpartition("_")[2]))
    dumps = {file.name: _digest([file]) for file in sorted(folder.glob("validation/*.jsonl"))}
    return Trajectory([_without_varying(row) for row in rows], _digest(_tensors_of(saved[-1])), dumps)


def differences(expected: Trajectory, got: Trajectory) -> list[str]:
    """Return in words where two trajectories differ."""
    found = []
    steps, steps_got = ([row["step"] for row in each.rows] for each in (expected, got))
    if steps != steps_got:
        found.append(f"rows of steps {steps_got} instead of {steps}")
    for row, other in zip(expected.rows, got.rows, strict=False):
        names = sorted(name for name in {*row, *other} if row.get(name) != other.get(name))
        if names:
            found.append(f"step {row['step']}: {', '.join(names[:3])} differ ({len(names)} in all)")
            break
    found += ["weights differ"] * (expected.weights != got.weights)
    found += ["validations differ"] * (expected.validation != got.validation)
    return found


def _without_varying(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(VARYING)}


def _tensors_of(checkpoint: Path) -> list[Path]:
    files = [file for file in checkpoint.rglob("*") if file.suffix in (".safetensors", ".distcp")]
    assert files, f"{checkpoint}: got no tensors"
    return sorted(files)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
