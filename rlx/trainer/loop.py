"""The training loop: generate, score, log-probs, advantages, update, sync."""

import time
from typing import NoReturn

from rlx.supervisor.link import Stopping, Terminated, tell
from rlx.trainer import step_metrics
from rlx.trainer.learning import Learner, SkippedUpdates
from rlx.trainer.run_state import Run
from rlx.trainer.samples import SampleSource
from rlx.trainer.saver import Saver, due
from rlx.trainer.transcripts import Transcripts, keeps_transcripts
from rlx.trainer.validation import Validation

Metrics = dict[str, float]


class Trainer:
    """Runs PPO or GRPO on a started worker group."""

    def __init__(self, run: Run):
        self.run = run
        self.saver = Saver(run.config, run.workers, run.folder / "checkpoints")
        self.samples = SampleSource(run)
        self.learner = Learner(run)
        self.validation = Validation(run, self.samples)
        self.skipped = SkippedUpdates()
        self.transcripts = Transcripts(run.tokenizer, run.folder / "transcripts")

    def step(self, step: int) -> Metrics:
        """Generate samples for a batch of prompts, take the optimizer steps on them, and return the step's metrics."""
        samples = self.samples.generate(step)
        batch, scored = self.samples.score(step, samples)
        batch = self.learner.log_probs(batch, step)
        batch, judged = self.learner.advantages(batch)
        batch, updated = self.learner.update(batch, step)
        self.samples.meet()
        if keeps_transcripts(self.run.config):
            self.transcripts.begin(step, batch)
        self.learner.sync(step)
        return judged | scored | updated | self.learner.account(step, batch, updated)

    def fit(self, stopping: Stopping | None = None) -> None:
        """Train to the last step; validate and save as configured.

        Args:
            stopping: asked after each step but the last whether the run is to save and end.

        Raises Terminated: the run was to end. A checkpoint was written if there was time.
        """
        trainer, run = self.run.config.trainer, self.run
        run.send_weights(updates=0)
        if trainer.val_only or (trainer.val_before_train and run.finished_steps == 0):
            self.report(self.validation.run() | self.learner.memory_of("validate"))
        while run.finished_steps < run.last_step and not trainer.val_only:
            tell(step=run.finished_steps + 1)
            with run.progress.step(run.finished_steps + 1) as timings:
                metrics = self.step(run.finished_steps + 1)
                run.finished_steps += 1
                if due(trainer.test_freq, run.finished_steps, run.last_step):
                    metrics |= self.validation.run() | self.learner.memory_of("validate")
                if self.saver.is_due(run.finished_steps, run.last_step):
                    with run.progress.phase("checkpoint"):
                        self.transcripts.settle()  # a resume does not repeat the step
                        self.saver.begin(run.of_driver())
                    metrics |= self.learner.memory_of("checkpoint")
            self.report(metrics | timings | step_metrics.rates(metrics, timings))
            run.timeline.end(run.finished_steps, run.progress.step_began, run.progress.spans, metrics | timings)
            self.skipped.judge(run.finished_steps, metrics)
            self.saver.settle()  # after the row, so that a whole checkpoint never lacks one
            if stopping and (left_s := stopping.left_s) is not None and run.finished_steps < run.last_step:
                self.end_early(left_s)
        self.skipped.end()
        run.timeline.write()
        self.transcripts.settle()
        self.saver.close(None if trainer.val_only else run.of_driver())

    def end_early(self, left_s: float) -> NoReturn:
        """Save and copy, if there is time, and raise Terminated; StorageError if the save or a copy failed."""
        end_s = time.monotonic() + left_s
        self.run.timeline.write()
        self.transcripts.settle()
        left_s = end_s - time.monotonic()
        if left_s > 0 and (saved := self.saver.save_now(self.run.of_driver(), left_s)):
            tell(saved=str(saved))
            self.saver.wait_for_copies(max(0.0, end_s - time.monotonic()))
        raise Terminated

    def report(self, metrics: Metrics) -> None:
        """Show and keep the metrics of the last finished step."""
        metrics |= self.run.rewards.usage()
        self.run.progress.row(metrics, self.run.finished_steps)
        self.run.tracker.log(metrics, self.run.finished_steps)
