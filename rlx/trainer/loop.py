"""The training loop: generate, score, log-probs, advantages, update, sync."""

import time
from pathlib import Path
from typing import NoReturn

from transformers import PreTrainedTokenizerBase

from rlx.cluster.group import WorkerGroup
from rlx.config.schema import PPOConfig
from rlx.data.prompts import PromptDataset
from rlx.data.sampler import PromptSampler
from rlx.rewards.manager import RewardManager
from rlx.supervisor.link import tell
from rlx.supervisor.stopping import Stopping, Terminated
from rlx.trainer import environment_rows, steps, transcripts
from rlx.trainer.learning import Learner
from rlx.trainer.progress import Progress
from rlx.trainer.run_state import RunState
from rlx.trainer.samples import SampleSource, Validation
from rlx.trainer.saver import Saver, due
from rlx.trainer.skipped_updates import SkippedUpdates
from rlx.trainer.tracking import Tracker

Metrics = dict[str, float]


class Trainer:
    """Runs PPO or GRPO on a started worker group.

    Args:
        config: with total_training_steps and the critic's nulls set, and folders or hub names as model paths.
        workers: hosts the roles that `roles_of(config)` names.
        tokenizer: of the actor's model.
        train, val: prompts; `val` is needed for validations alone.
        sampler: chooses the next prompts of `train`.
        rewards: scores responses.
        folder: of the run, for validation and checkpoints.
        progress, tracker: show and keep the metrics.
    """

    def __init__(
        self,
        config: PPOConfig,
        workers: WorkerGroup,
        tokenizer: PreTrainedTokenizerBase,
        train: PromptDataset,
        sampler: PromptSampler,
        val: PromptDataset | None,
        rewards: RewardManager,
        folder: Path,
        progress: Progress,
        tracker: Tracker,
    ):
        self.config, self.tokenizer, self.folder = config, tokenizer, folder
        self.rewards, self.progress, self.tracker = rewards, progress, tracker
        self.saver = Saver(config, workers, folder / "checkpoints")
        self.state, self.skipped = (state := RunState(config, sampler)), SkippedUpdates()
        self.learner = Learner(config, workers, progress, state)
        self.samples = SampleSource(config, workers, tokenizer, train, sampler, rewards, folder, progress, state)
        self.validation = Validation(config, self.samples, val, folder, progress, tracker, state)

    def step(self, step: int) -> Metrics:
        """Generate samples for a batch of prompts, take the optimizer steps on them, and return the step's metrics."""
        samples = self.samples.generate(step)
        batch, metrics = self.samples.score(step, samples)
        batch, compared = self.learner.log_probs(batch)
        batch, rewarded = self.learner.advantages(batch)
        transcripts.keep(self.config, self.folder, step, batch, self.tokenizer)
        updated = self.learner.update(batch, step)
        if step > self.config.trainer.critic_warmup:
            with self.progress.phase("sync"):
                self.learner.sync()
        metrics = steps.describe(batch) | environment_rows.describe(batch) | metrics | compared | rewarded | updated
        return metrics | self.learner.account(step, batch, metrics)

    def fit(self, stopping: Stopping | None = None) -> None:
        """Train to the last step; validate and save as configured.

        Args:
            stopping: asked after each step whether the run is to save and end.

        Raises:
            Terminated: the run was to end. A checkpoint was written if there was time.
        """
        trainer, state = self.config.trainer, self.state
        self.learner.sync(updates=0)
        if trainer.val_only or (trainer.val_before_train and state.finished_steps == 0):
            self.report(self.validation.run() | self.learner.memory_of("validate"))
        while state.finished_steps < state.last_step and not trainer.val_only:
            tell(step=state.finished_steps + 1)
            with self.progress.step(state.finished_steps + 1) as timings:
                metrics = self.step(state.finished_steps + 1)
                state.finished_steps += 1
                if due(trainer.test_freq, state.finished_steps, state.last_step):
                    metrics |= self.validation.run() | self.learner.memory_of("validate")
                if self.saver.is_due(state.finished_steps, state.last_step):
                    with self.progress.phase("checkpoint"):
                        self.saver.begin(state.of_driver())
                    metrics |= self.learner.memory_of("checkpoint")
            self.report(metrics | timings | steps.rates(metrics, timings))
            self.skipped.judge(state.finished_steps, metrics)
            self.saver.settle()  # after the row, so that a whole checkpoint never lacks one
            if stopping is not None and (left_s := stopping.left_s) is not None:
                self.end_early(left_s)
        self.skipped.end()
        self.saver.close(None if trainer.val_only else state.of_driver())

    def end_early(self, left_s: float) -> NoReturn:
        """Save and copy, if there is time, and raise Terminated; StorageError if the save or a copy failed."""
        end_s = time.monotonic() + left_s
        if left_s > 0 and (saved := self.saver.save_now(self.state.of_driver(), left_s)):
            tell(saved=str(saved))
            self.saver.wait_for_copies(max(0.0, end_s - time.monotonic()))
        raise Terminated

    def report(self, metrics: Metrics) -> None:
        """Show and keep the metrics of the last finished step."""
        metrics |= self.rewards.usage()
        self.progress.row(metrics, self.state.finished_steps)
        self.tracker.log(metrics, self.state.finished_steps)
