"""Find before anything starts that the run to resume has no step left."""

from pathlib import Path
from typing import NamedTuple

from rlx.config.check.folders import is_url
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import prompts_at_once
from rlx.errors import ExplainedError
from rlx.supervisor import link
from rlx.trainer.checkpoints import nothing_to_train, require_step, starting_checkpoint
from rlx.trainer.data_check import training_rows


class Finished(NamedTuple):
    """A run without a step left: its folder, and what to tell."""

    folder: Path
    text: str


def finished(config: PPOConfig) -> Finished | None:
    """Return the run to resume if its newest checkpoint is of the last step; None if it is not, or if that is not known here.

    Object storage is not asked, and a faulty checkpoint is reported when the run starts, beside its other faults. A driver that
    the supervisor started again is not judged: it ends its own run.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable" or trainer.val_only or link.folder_to_continue() is not None:
        return None
    if is_url(trainer.default_local_dir) or is_url(trainer.resume_from_path):
        return None
    try:
        checkpoint = starting_checkpoint(config).checkpoint
    except (ExplainedError, OSError):
        return None
    last_step = trainer.total_training_steps or _most_steps(config)
    if checkpoint is None or last_step is None or require_step(checkpoint) < last_step:
        return None
    text = f"{nothing_to_train(require_step(checkpoint), last_step, trainer)} ({checkpoint})"
    return Finished(checkpoint.parent.parent, text)


def _most_steps(config: PPOConfig) -> int | None:
    """Return the number of steps if no prompt is dropped; None if the rows cannot be counted."""
    rows = training_rows(config)
    return None if rows is None else rows // prompts_at_once(config) * config.trainer.total_epochs
