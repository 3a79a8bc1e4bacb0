"""A trained policy as a user names it: a run, one of its checkpoints, or a Hugging Face folder; and its settings as overrides."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlx.checkpoint.manifest import few
from rlx.config.compose.command_line import MODEL_KEY, compose
from rlx.config.secrets import HIDDEN
from rlx.program import program
from rlx.step_folders import step_of, steps_in
from rlx.trainer import checkpoints
from rlx.trainer.checkpoints import ResumeError, refusal_of, require_step
from rlx.trainer.resume_config import FIRST, config_at, flat

TRAINING = ("trainer.", "critic.", "data.train_files")
KEPT = ("trainer.seed", "trainer.device", "trainer.memory_check")
"""Of the keys of TRAINING those that matter outside it."""
CHOSEN = (
    *("algorithm.adv_estimator", "actor_rollout_ref.actor.use_dynamic_bsz"),
    *("actor_rollout_ref.rollout.max_num_seqs", "actor_rollout_ref.rollout.n"),
)
"""Keys that rlx would choose for this machine if they were not given."""


class Policy(NamedTuple):
    """A trained policy."""

    folder: Path  # of the checkpoint, or a Hugging Face folder
    checkpoint: Path | None
    overrides: list[str]  # the settings that it was trained with, or the path of the model alone
    hidden: tuple[str, ...] = ()  # keys of secrets, which no file has

    @property
    def step(self) -> int:
        return require_step(self.checkpoint) if self.checkpoint else 0

    def with_given(self, given: Sequence[str]) -> list[str]:
        """Return the overrides with the user's own in place of those of the same keys. Raises ResumeError if a secret is missing."""
        keys = {each.partition("=")[0].lstrip("+") for each in given}
        if missing := [key for key in self.hidden if key not in keys]:
            raise ResumeError(
                f"{missing[0]}: {self.folder} was trained with a secret there, which no file keeps; add {missing[0]}=…"
            )
        return [*(each for each in self.overrides if each.partition("=")[0] not in keys), *given]


def policies_at(source: str, every: bool = False) -> list[Policy]:
    """Return the policy of a folder: of a run the newest whole checkpoint, or with `every` all of them.

    Raises ResumeError if there is none, or it is damaged.
    """
    folder = Path(source).expanduser().absolute()
    expected = "expected a run, its .../checkpoints/global_step_N, or a Hugging Face folder with config.json"
    if "://" in source:
        raise ResumeError(
            f"{source}: got a URL, {expected} on this machine; download it, or `{program('export')} {source} my-model`"
        )
    if folder.name == "actor" and step_of(folder.parent) is not None:
        folder = folder.parent
    if not folder.is_dir():
        beside = ", ".join(sorted(each.name for each in folder.parent.glob("*") if each.is_dir())[:8])
        raise ResumeError(f"{source}: does not exist, {expected}; {folder.parent} has {beside or 'no folder'}")
    if step_of(folder) is not None:
        if faults := refusal_of(folder).faults:
            raise checkpoints.unusable(folder, faults)
        return [_of_run(folder)]
    inside = folder / "checkpoints" if (folder / "checkpoints").is_dir() or (folder / FIRST).is_file() else folder
    if steps_in(inside):
        faults = {each: refusal_of(each).faults for each in checkpoints.checkpoints_in(inside)}
        whole = [each for each, found in faults.items() if not found]
        told = [f"passed over {each.name}: {few(found)}" for each, found in faults.items() if found]
        if not whole:
            raise checkpoints.none_is_whole(inside, told or ["none is finished yet"])
        for line in told:
            print(line, file=sys.stderr)
        return [_of_run(each) for each in (whole if every else whole[-1:])]
    if inside != folder:
        raise ResumeError(
            f"{source}: got a run without a checkpoint, expected one in {inside}; wait until the run saves, which trainer.save_freq and its "
            "end decide"
        )
    if not (folder / "config.json").is_file():
        names = sorted(each.name for each in folder.iterdir())
        some = ", ".join(names[:6]) + (", …" if len(names) > 6 else "") or "nothing"
        raise ResumeError(f"{source}: got a folder with {some}, {expected}; correct the path")
    return [Policy(folder, None, [f"{MODEL_KEY}={written(str(folder))}"])]


def _of_run(checkpoint: Path) -> Policy:
    run = checkpoint.parent.parent
    if not (run / FIRST).is_file():
        raise ResumeError(
            f"{checkpoint}: got no {run / FIRST}, expected the run's settings beside its checkpoints; copy the file, or "
            f"`{program('export')} {checkpoint} my-model` and name that folder"
        )
    default = flat(compose([f"{MODEL_KEY}=none"]).yaml, FIRST)
    # Not the settings of a resume from this step, which begin after it.
    values = config_at(run, require_step(checkpoint) - 1)
    values["trainer.seed"] = checkpoints.read_driver_state(checkpoint).seed
    changed = {key: value for key, value in values.items() if value != default.get(key, ...) or key in CHOSEN}
    # An evaluation compares training rows with the default of data.val_files.
    kept = KEPT if "data.val_files" in changed else (*KEPT, "data.train_files")
    own = {key: value for key, value in changed.items() if not key.startswith(TRAINING) or key in kept}
    hidden = tuple(key for key, value in own.items() if HIDDEN in str(value))
    return Policy(checkpoint, checkpoint, [f"{k}={written(v)}" for k, v in own.items() if k not in hidden], hidden)


def written(value: Any) -> str:
    """Return a value as Hydra reads it in an override."""
    match value:
        case None:
            return "null"
        case str():
            text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
            return value if re.fullmatch(r"[A-Za-z_/][\w./:-]*", value) and value.lower() not in WORDS else f"'{text}'"
        case list():
            return f"[{','.join(map(written, value))}]"
        case dict():
            pairs = ((re.sub(r"[^\w .\-/]", r"\\\g<0>", str(key)), written(each)) for key, each in value.items())
            return f"{{{','.join(f'{key}:{each}' for key, each in pairs)}}}"
    return str(value)


WORDS = {"null", "true", "false", "inf", "nan"}
