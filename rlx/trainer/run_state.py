"""What the driver itself has to keep of a run: read from a checkpoint and written to the next."""

from pathlib import Path

from rlx.algorithms.kl import KLController
from rlx.cluster.group import WorkerGroup
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import trained_roles
from rlx.data.sampler import PromptSampler
from rlx.trainer.checkpoints import (
    SUPERSEDED,
    DriverState,
    nothing_to_train,
    read_driver_state,
    require_step,
    set_aside_later,
)
from rlx.trainer.progress import Progress
from rlx.trainer.saver import Saver
from rlx.trainer.tracking import Tracker

Metrics = dict[str, float]


def kl_controller(config: PPOConfig) -> KLController:
    """Return the controller of the KL's weight in the reward."""
    control = config.algorithm.kl_ctrl
    return KLController(control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon)


class RunState:
    """The position of a run.

    Args:
        config: the tree.
        sampler: chooses the next prompts.

    Attributes:
        finished_steps: of the run.
        policy_version: updates that the sampler has received.
        skipped_steps: optimizer steps without a finite gradient.
        seed: of the run; a resumed run keeps its own.
        kl_controller: of the KL in the reward.
        first_validation: metrics.
    """

    def __init__(self, config: PPOConfig, sampler: PromptSampler):
        self._config, self._sampler = config, sampler
        self.kl_controller = kl_controller(config)
        self.seed = config.trainer.seed
        self.last_step = config.trainer.total_training_steps or 0
        self.finished_steps = self.policy_version = self.skipped_steps = 0
        self.first_validation: Metrics = {}

    def load(
        self,
        checkpoint: Path,
        workers: WorkerGroup,
        saver: Saver,
        tracker: Tracker,
        progress: Progress,
        falls_back: bool = False,
    ) -> None:
        """Continue from a checkpoint that `Saver` wrote; a run that does so equals one that never stopped.

        Args:
            checkpoint: whole, as far as `newest_whole` can tell. The workers check its tensors before they read them.
            workers, saver, tracker, progress: of the run.
            falls_back: take an older one of the run instead of a damaged one, and begin anew if all are damaged.

        Raises:
            ResumeError: it is damaged.
        """
        trainer = self._config.trainer
        whole, passed_over = saver.undamaged(checkpoint, falls_back)
        for line in passed_over:
            progress.notice(line)
        step = require_step(whole) if whole else 0
        tracker.rewind(step if whole else -1)
        if not trainer.val_only and (later := set_aside_later(checkpoint.parent, step)):
            progress.notice(
                f"checkpoints of later steps are now in {checkpoint.parent / SUPERSEDED}: {', '.join(later)}"
            )
        if whole is None:
            progress.notice("all checkpoints of this run are damaged: it begins anew")
            return
        state = read_driver_state(whole)
        for role in trained_roles(self._config):
            workers.broadcast(role.name, "load", str(whole / role.name))
        self._sampler.load_state_dict(state.sampler)
        self.kl_controller.load_state_dict(state.kl_controller)
        self.finished_steps, self.seed = state.step, state.seed
        self.policy_version, self.skipped_steps = state.policy_version, state.skipped_steps
        self.first_validation = state.first_validation
        if state.seed != trainer.seed:
            progress.notice(f"trainer.seed={trainer.seed} has no effect: the resumed run keeps its seed {state.seed}")
        if self.finished_steps >= self.last_step and not trainer.val_only:
            progress.notice(nothing_to_train(self.finished_steps, self.last_step, trainer))

    def of_driver(self) -> DriverState:
        """Return what a checkpoint keeps."""
        return DriverState(
            step=self.finished_steps,
            seed=self.seed,
            policy_version=self.policy_version,
            sampler=self._sampler.state_dict(),
            kl_controller=self.kl_controller.state_dict(),
            skipped_steps=self.skipped_steps,
            first_validation=self.first_validation,
        )
