"""The folder of a run, the checkpoint it starts from, and the driver's own state.

<default_local_dir>/<time>/            the run: config.yaml, metrics.jsonl, report.png, validation/
    checkpoints/global_step_N/
        actor/  critic/                written by the workers (torch.distributed.checkpoint)
        driver.json                    written last: a checkpoint without it is unfinished and never resumed from
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlx.config.check.folders import runs_folder
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import trained_roles
from rlx.errors import ExplainedError

STEP_FOLDER = re.compile(r"global_step_(\d+)")


class ResumeError(ExplainedError, ValueError):
    """The requested checkpoint cannot be used."""


@dataclass(frozen=True)
class DriverState:
    """The driver's state at the end of a step, from which it continues exactly."""

    step: int
    seed: int
    policy_version: int
    sampler: dict[str, Any]
    kl_controller: dict[str, Any]
    skipped_steps: int
    first_validation: dict[str, float]


def finished(checkpoint: Path) -> bool:
    """Whether the checkpoint is complete."""
    return (checkpoint / "driver.json").is_file()


def step_of(checkpoint: Path) -> int:
    """Return N of global_step_N."""
    match = STEP_FOLDER.fullmatch(checkpoint.name)
    if match is None:
        raise ResumeError(
            f"got {checkpoint}, expected a folder named global_step_N, in the checkpoints folder of a run"
        )
    return int(match[1])


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, the oldest step first."""
    found = [c for c in folder.glob("global_step_*") if STEP_FOLDER.fullmatch(c.name) and finished(c)]
    return sorted(found, key=step_of)


def starting_checkpoint(config: PPOConfig) -> Path | None:
    """Return the checkpoint to continue from, or None to start anew.

    Raises:
        ResumeError: resume_from_path is no finished checkpoint.
    """
    mode = config.trainer.resume_mode
    if mode == "disable":
        return None
    if mode == "resume_path":
        path = Path(config.trainer.resume_from_path or "").expanduser().absolute()
        step_of(path)
        if not finished(path):
            raise ResumeError(
                f"trainer.resume_from_path={path}: got a folder without driver.json, expected a finished checkpoint; "
                f"finished ones there: {[c.name for c in checkpoints_in(path.parent)]}"
            )
        return path
    candidates = [c for run in runs_folder(config).glob("*/checkpoints") for c in checkpoints_in(run)]
    return max(candidates, key=lambda c: (c / "driver.json").stat().st_mtime_ns, default=None)


def require_parts(config: PPOConfig, checkpoint: Path) -> None:
    """Check that a finished checkpoint has the parts that this run needs. Loading checks whether their tensors fit.

    Raises:
        ResumeError: a role's part is missing or holds no model, or only one of checkpoint and run has LoRA adapters.
    """
    faults = []
    for role in trained_roles(config):
        described = checkpoint / role.name / "checkpoint.json"
        if not described.is_file():
            held = sorted(part.name for part in checkpoint.iterdir() if (part / "checkpoint.json").is_file())
            faults.append(
                f"there is no {role.name} in it, only {held}: resume with the algorithm.adv_estimator that wrote it"
            )
            continue
        known = json.loads(described.read_text())
        if "model" not in known["contents"]:
            faults.append(
                f"its {role.name} holds {known['contents']} without the model: only a run with {role.key}.checkpoint."
                "save_contents=[model,optimizer,extra] can be resumed"
            )
        elif bool(known["adapters"]) != (role.model.lora_rank > 0):
            have = "LoRA adapters" if known["adapters"] else "no LoRA adapters"
            faults.append(
                f"its {role.name} has {have}, but {role.model_key}.lora_rank={role.model.lora_rank}: set it as in the run that "
                "wrote it"
            )
    if faults:
        raise ResumeError(f"cannot resume from {checkpoint}: {'; '.join(faults)}")


def run_folder(config: PPOConfig, checkpoint: Path | None) -> Path:
    """Return the folder of this run: the resumed run's own, or a new one named by the time."""
    if checkpoint is not None:
        return checkpoint.parent.parent
    base = runs_folder(config)
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"_{i}" for i in range(1, 1000))):
        folder = base / (stamp + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ResumeError(f"{base}: got a thousand runs started in the same second, expected fewer; try again")


def reopen(checkpoint: Path) -> None:
    """Remove the mark of a finished checkpoint before its parts are written again."""
    (checkpoint / "driver.json").unlink(missing_ok=True)


def write_driver_state(checkpoint: Path, state: DriverState) -> None:
    """Mark the checkpoint as finished by writing driver.json, completely or not at all."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    half = checkpoint / "driver.json.part"
    half.write_text(json.dumps(asdict(state), indent=1))
    os.replace(half, checkpoint / "driver.json")


def read_driver_state(checkpoint: Path) -> DriverState:
    """Return the state that `write_driver_state` wrote."""
    return DriverState(**json.loads((checkpoint / "driver.json").read_text()))


def keep_newest(folder: Path, role: str, keep: int | None, step: int) -> None:
    """Remove the role's part of all but its newest `keep` checkpoints, and folders left without parts; None keeps all.

    `step` was just written. A checkpoint of a later step counts as older: the run resumed from an earlier step since then.
    """
    if keep is None:
        return
    found = [c for c in folder.glob("global_step_*") if (c / role).is_dir()]
    holders = sorted(found, key=lambda c: (step_of(c) <= step, step_of(c)))
    for old in holders[:-keep]:
        # The mark goes first, so that a crash in between leaves no checkpoint that looks complete.
        (old / "driver.json").unlink(missing_ok=True)
        shutil.rmtree(old / role)
        if not any(child.is_dir() for child in old.iterdir()):
            shutil.rmtree(old)
