"""The folder of a run, the checkpoint it starts from, and the driver's own state.

<default_local_dir>/<time>/            the run: config.yaml, metrics.jsonl, report.png, validation/
    checkpoints/global_step_N/         appears when it is whole; until then it is .global_step_N.partial
        actor/  critic/                written by the workers, see rlx/checkpoint/role.py
        driver.json                    the driver's state
        queue.json                     prompts drawn before their step, with what their samples have; not without partial rollouts
        manifest.json                  digests of driver.json and of the roles' manifests, written last
    checkpoints/superseded/            checkpoints of later steps than one that the run was resumed from
"""

import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rlx.checkpoint import manifest
from rlx.checkpoint.folders import RemoteFolder
from rlx.checkpoint.manifest import MANIFEST, CheckpointError, OtherVersionError, few
from rlx.config.check.folders import is_url, runs_folder
from rlx.config.schema import PPOConfig, TrainerConfig
from rlx.config.schema.roles import prompts_at_once, trained_roles
from rlx.errors import ExplainedError, storing
from rlx.step_folders import step_of, steps_in
from rlx.supervisor import link
from rlx.trainer.try_inputs import training_rows

RUN_FOLDER = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(?:_(\d+))?")
SUPERSEDED = "superseded"
EVALUATION = "settings.json"
"""In the folder of an evaluation: what its samples depend on."""
QUEUE, QUEUE_FILE = "queue", "queue.json"
COUNTS = ("step", "seed", "policy_version", "skipped_steps", "sampler.epoch", "sampler.position")


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
    queue: list[dict[str, Any]] = field(default_factory=list)  # see prompt_queue.py; in a file of its own, if any


class Choice(NamedTuple):
    """A checkpoint to continue from, or None for a new run; and newer ones that cannot be used, each with the reason."""

    checkpoint: Path | None
    passed_over: list[str]


def is_finished(checkpoint: Path) -> bool:
    """Whether the folder was written to its end, even if its manifest is lost. `refusal_of` tells whether it still is whole."""
    return (checkpoint / MANIFEST).is_file() or (checkpoint / "driver.json").is_file()


def require_step(checkpoint: Path) -> int:
    """Return N of global_step_N. Raises ResumeError for another name."""
    step = step_of(checkpoint)
    if step is None:
        raise ResumeError(
            f"got {checkpoint}, expected a folder named global_step_N, in the checkpoints folder of a run"
        )
    return step


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, the oldest step first."""
    return [checkpoint for checkpoint in steps_in(folder).values() if is_finished(checkpoint)]


class Refusal(NamedTuple):
    """Why a finished checkpoint cannot be used: its faults, none if it can; and whether it may be whole but is unreadable here."""

    faults: list[str]
    may_be_whole: bool = False


def refusal_of(checkpoint: Path) -> Refusal:
    """Return why a finished checkpoint cannot be used, as far as names, sizes and small files show it; takes milliseconds."""
    try:
        if faults := manifest.damage(checkpoint):
            return Refusal(faults)
        read_driver_state(checkpoint)
    except CheckpointError as error:
        return Refusal([str(error)], may_be_whole=isinstance(error, OtherVersionError))
    except OSError as error:
        return Refusal([f"{error.filename or checkpoint}: cannot be read ({error.strerror})"], may_be_whole=True)
    return Refusal([])


def newest_whole(folder: Path, before: int | None = None) -> Choice:
    """Return the checkpoint of the latest step (earlier than `before`) without faults, None if there is none or all are damaged.

    Raises ResumeError if none can be used, but another version could read one, or the system refused.
    """
    passed_over, may_be_whole = [], False
    for checkpoint in reversed(checkpoints_in(folder)):
        if before is None or require_step(checkpoint) < before:
            refusal = refusal_of(checkpoint)
            if not refusal.faults:
                return Choice(checkpoint, passed_over)
            passed_over.append(f"passed over {checkpoint.name}: {few(refusal.faults)}")
            may_be_whole |= refusal.may_be_whole
    if may_be_whole:
        raise none_is_whole(folder, passed_over)
    return Choice(None, passed_over)


def starting_checkpoint(config: PPOConfig) -> Choice:
    """Return the checkpoint to continue from.

    `auto` takes the newest run that has checkpoints, by the time in its folder's name, and in it the latest step that is whole. If
    all of them are damaged, a new run starts in another folder: no user may be there to decide, and nothing is lost.

    Raises ResumeError: resume_from_path is no whole checkpoint; or none of the newest run can be used, but another version
    could use one or the system refused, or trainer.val_only asks for one.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return Choice(None, [])
    if trainer.resume_mode == "resume_path":
        return Choice(_named(Path(trainer.resume_from_path or "").expanduser().absolute()), [])
    runs = [run for run in runs_folder(config).glob("*/checkpoints") if checkpoints_in(run)]
    if not runs:
        return Choice(None, [])
    newest = max(runs, key=lambda folder: order_of(folder.parent.name))
    choice = newest_whole(newest)
    if choice.checkpoint is None and trainer.val_only:
        raise none_is_whole(newest, choice.passed_over)
    return choice


def checkpoint_of(config: PPOConfig) -> Choice:
    """Return the checkpoint to continue from, which has the parts that this run needs. Raises ResumeError, CheckpointError."""
    try:
        choice = starting_checkpoint(config)
        if choice.checkpoint is not None:
            require_parts(config, choice.checkpoint)
    except OSError as error:  # such as a name that is too long
        raise ResumeError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return choice


def none_is_whole(folder: Path, passed_over: Iterable[str]) -> ResumeError:
    """Return the error for a run without any checkpoint that can be used."""
    return ResumeError(
        f"{folder}: no checkpoint can be used: {'; '.join(passed_over)}; name one of another run "
        "(trainer.resume_from_path), or start a new run with trainer.resume_mode=disable"
    )


def _named(path: Path) -> Path:
    require_step(path)
    if not is_finished(path):
        raise ResumeError(
            f"trainer.resume_from_path={path}: got a folder without {MANIFEST}, expected a finished checkpoint; "
            f"finished ones there: {[c.name for c in checkpoints_in(path.parent)]}"
        )
    if faults := refusal_of(path).faults:
        raise unusable(path, faults)
    return path


def unusable(checkpoint: Path, faults: Sequence[str]) -> ResumeError:
    """Return the error for a named checkpoint with these faults; it names the newest other one of the run that seems whole."""
    others = [each for each in checkpoints_in(checkpoint.parent) if each != checkpoint and not refusal_of(each).faults]
    remedy = "name one of another run, or start a new run with trainer.resume_mode=disable"
    if others:
        remedy = f"name {others[-1]}, or set trainer.resume_mode=auto, which passes over damaged ones"
    return ResumeError(f"trainer.resume_from_path={checkpoint} cannot be used: {few(faults)}; {remedy}")


def require_parts(config: PPOConfig, checkpoint: Path) -> None:
    """Check that a whole checkpoint has the parts that this run needs. Loading checks whether their tensors fit.

    Raises ResumeError: a role's part is missing or holds no model, or only one of checkpoint and run has LoRA adapters.
    """
    faults = []
    for role in trained_roles(config):
        described = checkpoint / role.name / "checkpoint.json"
        if not described.is_file():
            held = sorted(part.name for part in checkpoint.iterdir() if (part / "checkpoint.json").is_file())
            remedy = "resume with the algorithm.adv_estimator that wrote it"
            faults.append(f"there is no {role.name} in it, only {held}: {remedy}")
            continue
        known = manifest.read_json(described)
        if not {"contents", "adapters"} <= set(known):
            faults.append(f"{described} was written by another version of rlx: resume with that version")
        elif "model" not in known["contents"]:
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
    state, control = read_driver_state(checkpoint), config.algorithm.kl_ctrl.type
    saved = state.kl_controller.get("type")
    if state.queue and (missing := _settings_for_queue(config)):
        older = "it has samples that go on from tokens of older weights, also with partial.max_staleness=0"
        faults.append(f"{older}; set {', '.join(missing)}")
    if saved is not None and saved != control:
        faults.append(
            f"it was written with algorithm.kl_ctrl.type={saved!r}, this run has {control!r}: set it as before"
        )
    if faults:
        raise ResumeError(f"cannot resume from {checkpoint}: {'; '.join(faults)}")


def _settings_for_queue(config: PPOConfig) -> list[str]:
    """Return the settings that are missing for samples of a checkpoint that have not ended to go on."""
    rollout, environment = config.actor_rollout_ref.rollout, config.environment.name
    needed = {
        "algorithm.rollout_correction.rollout_is=token": config.algorithm.rollout_correction.rollout_is,
        "actor_rollout_ref.rollout.stop=[]": not rollout.stop,
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=False": not rollout.enable_rollout_routing_replay,
        "environment.name as before": environment not in ("endpoint", "verifiers"),
    }
    return [] if config.trainer.val_only else [setting for setting, is_met in needed.items() if not is_met]


def order_of(run: str) -> tuple[str, int]:
    """Return what orders the names of runs by their beginning: the time, and a number among those that share it."""
    found = RUN_FOLDER.fullmatch(run)
    return (found[1], int(found[2] or 0)) if found else (run, 0)


def is_evaluation(config: PPOConfig) -> bool:
    """Whether this is a validation of `rlx eval`, which writes to `validation_data_dir` alone; see `rlx/trainer/evaluate.py`."""
    folder = config.trainer.validation_data_dir
    return config.trainer.val_only and folder is not None and (Path(folder) / EVALUATION).is_file()


def run_folder(config: PPOConfig, checkpoint: Path | None) -> Path:
    """Return the folder of this run: the resumed run's own, or a new one named by the time."""
    if is_evaluation(config):
        return Path(config.trainer.validation_data_dir or "")
    if checkpoint is not None:
        return checkpoint.parent.parent
    base = runs_folder(config)
    while True:
        # A clock may go back, in autumn for example, but the newest run is the last by name.
        runs = (order_of(each.name) for each in base.glob("*") if RUN_FOLDER.fullmatch(each.name))
        before = max(runs, default=("", 0))
        stamp, number = max((datetime.now().strftime("%Y-%m-%d_%H-%M-%S"), 0), (before[0], before[1] + 1))
        folder = base / (f"{stamp}_{number}" if number else stamp)
        with storing(folder, "begin again"):
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # another run has just made it
                continue
        return folder


def write_driver_state(checkpoint: Path, state: DriverState) -> None:
    with storing(checkpoint):
        own = {name: value for name, value in vars(state).items() if name != QUEUE}
        (checkpoint / "driver.json").write_text(json.dumps(own, indent=1))
        if state.queue:
            (checkpoint / QUEUE_FILE).write_text(json.dumps({QUEUE: state.queue}))


def read_driver_state(checkpoint: Path) -> DriverState:
    """Return what `write_driver_state` wrote. Raises OtherVersionError for other keys, CheckpointError for damage or another step."""
    path = checkpoint / "driver.json"
    found, flat = manifest.read_json(path), {}
    manifest.require_keys(path, found, [each.name for each in fields(DriverState) if each.name != QUEUE])
    for name, value in found.items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    wrong = [name for name in COUNTS if not manifest.is_count(flat.get(name))]
    wrong += [
        name
        for name in flat
        if name == "first_validation" or (name.startswith("first_validation.") and type(flat[name]) not in (int, float))
    ]
    coef, position, size = (flat.get(name) for name in ("kl_controller.coef", "sampler.position", "sampler.size"))
    if type(coef) not in (int, float) or not 0 <= coef < math.inf:
        wrong.append("kl_controller.coef")
    faults = [f"{name}={flat.get(name)!r:.40}" for name in wrong]
    if not wrong and manifest.is_count(size) and position > size:
        faults = [f"sampler.position={position} of {size} prompts"]
    if faults:
        raise CheckpointError(f"{path}: got {few(faults)}, which rlx's driver never writes")
    if found["step"] != (step := require_step(checkpoint)):
        raise CheckpointError(f"{path}: got the state of step {found['step']}, expected {step}")
    waiting = checkpoint / QUEUE_FILE
    return DriverState(**found, queue=manifest.read_json(waiting)[QUEUE] if waiting.is_file() else [])


def nothing_to_train(step: int, last_step: int, trainer: TrainerConfig) -> str:
    """Return what a run says that resumes from its last step.

    With `resume_mode=auto` the run found may not be the one meant. The keys that name the folder of runs keep runs apart; with a
    URL that folder exists twice, there and on this machine.
    """
    other = ""
    if trainer.resume_mode == "auto":
        given = trainer.default_local_dir
        keys = ["trainer.default_local_dir"] * (given is not None)
        keys += ["trainer.experiment_name"] * (given is None or is_url(given))
        other = f", or set another {' and another '.join(keys)} if this is to be another run"
    return (
        f"nothing to train: the checkpoint is of step {step} and the run ends at {last_step}; raise "
        f"trainer.total_training_steps or trainer.total_epochs{other}"
    )


def resumes_here(config: PPOConfig) -> bool:
    """Whether files of this machine tell what the run resumes.

    Object storage is asked when the run starts. A driver that the supervisor started again goes on with its own run.
    """
    trainer = config.trainer
    in_storage = is_url(trainer.default_local_dir) or is_url(trainer.resume_from_path)
    return trainer.resume_mode != "disable" and not in_storage and link.folder_to_continue() is None


def end_of_run(config: PPOConfig) -> tuple[Path, str] | None:
    """Return the folder of the run to resume and what to tell, if its newest checkpoint is of the last step.

    None if it is not, or if that is not known here.
    """
    trainer = config.trainer
    if trainer.val_only or not resumes_here(config):
        return None
    try:
        checkpoint = starting_checkpoint(config).checkpoint
    except (ExplainedError, OSError):
        return None
    last_step = trainer.total_training_steps
    if last_step is None and (rows := training_rows(config)) is not None:  # the most there are, if no prompt is dropped
        last_step = rows // prompts_at_once(config) * trainer.total_epochs
    if checkpoint is None or last_step is None or require_step(checkpoint) < last_step:
        return None
    text = f"{nothing_to_train(require_step(checkpoint), last_step, trainer)} ({checkpoint})"
    return checkpoint.parent.parent, text


def set_aside_later(folder: Path, step: int, runs: str | None = None) -> list[str]:
    """Move checkpoints of later steps than `step` to `superseded/`, because the run repeats these steps; return their names.

    So are their copies if the folder of all `runs` is a URL, from which the next resume would fetch them.
    """
    later = [checkpoint for of, checkpoint in steps_in(folder).items() if of > step]
    aside, names = folder / SUPERSEDED, {checkpoint.name for checkpoint in later}
    with storing(folder):
        for checkpoint in later:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / checkpoint.name, ignore_errors=True)
            checkpoint.rename(aside / checkpoint.name)
    if is_url(runs):
        remote, below = RemoteFolder(runs), f"{folder.parent.name}/checkpoints"
        copied = [name for name in remote.names(below) if (step_of(Path(name)) or 0) > step]
        for name in copied:
            remote.move(f"{below}/{name}", f"{below}/{SUPERSEDED}/{name}")
        names.update(copied)
    return sorted(names)


def keep_newest(folder: Path, role: str, keep: int | None, spare: Path | None = None) -> None:
    """Remove the role's part of every checkpoint but its newest `keep` and `spare`, and folders left without parts; None keeps all."""
    if keep is None:
        return
    holders = [checkpoint for checkpoint in steps_in(folder).values() if (checkpoint / role).is_dir()]
    for old in (each for each in holders[:-keep] if each != spare):
        # The marks go first, so that a crash in between leaves no checkpoint that looks complete.
        for mark in (MANIFEST, "driver.json"):
            (old / mark).unlink(missing_ok=True)
        shutil.rmtree(old / role)
        if not any(child.is_dir() for child in old.iterdir()):
            shutil.rmtree(old)
