"""Where samples come from: prompts, the sampler's responses, and their scores, for a step and for a validation."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rlx.algorithms.advantages import ESTIMATORS
from rlx.cluster.group import WorkerGroup
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_reward_model
from rlx.data.batch import Batch
from rlx.data.prompts import PromptDataset
from rlx.data.sampler import PromptSampler
from rlx.rewards.manager import RewardManager, Scores
from rlx.trainer import environment_rows, sample_selection, steps, validation
from rlx.trainer.balancing import balance
from rlx.trainer.environment_rows import FailedConversations
from rlx.trainer.forked_conversations import all_rows
from rlx.trainer.progress import Progress
from rlx.trainer.run_state import RunState
from rlx.trainer.tracking import Tracker

Metrics = dict[str, float]


class Samples(NamedTuple):
    """Responses to prompts.

    Args:
        batch: a row for each; with `greedy_scores` if the estimator reads them.
        scores: of each; None: not scored yet.
        metrics: of how they were found.
    """

    batch: Batch
    scores: Scores | None
    metrics: Metrics


class SampleSource:
    """Generates and scores samples for training and validation.

    Args: those of `Trainer`.
    """

    def __init__(
        self,
        config: PPOConfig,
        workers: WorkerGroup,
        tokenizer: PreTrainedTokenizerBase,
        train: PromptDataset,
        sampler: PromptSampler,
        rewards: RewardManager,
        folder: Path,
        progress: Progress,
        state: RunState,
    ):
        self._config, self._workers, self._tokenizer = config, workers, tokenizer
        self._train, self._sampler = train, sampler
        self._rewards, self._folder, self._progress, self._state = rewards, folder, progress, state
        self._failed = FailedConversations(config.environment, progress)

    def generate(self, step: int) -> Samples:
        """Return samples of train_batch_size prompts; with filter_groups scored ones, only of prompts whose samples differ.

        With filter_groups it draws prompts until there are enough and drops the surplus; the next step draws others.
        """
        filters, data = self._config.algorithm.filter_groups, self._config.data
        epoch = {"train/epoch": float(self._sampler.epoch)}
        if not filters.enable:
            return Samples(self._drawn(step, first=0), None, epoch)
        found = sample_selection.DynamicSampling(
            filters.metric, data.train_batch_size, self._config.actor_rollout_ref.rollout.n
        )
        while not found.enough:
            if found.generations == filters.max_num_gen_batches > 0:
                raise found.error(step)
            found.add(*self._scored(self._drawn(step, first=found.prompts)))
        return Samples(*found.samples(), epoch | found.metrics())

    def score(self, step: int, samples: Samples) -> tuple[Batch, Metrics]:
        """Score samples unless they are; return the rows for the models, dealt to processes, and the metrics of all."""
        trainer = self._config.trainer
        batch, scores, metrics = samples
        if scores is None:
            batch, scores = self._scored(batch)
        if trainer.rollout_data_dir:
            validation.dump(validation.generations(batch, scores), Path(trainer.rollout_data_dir), step)
        batch = all_rows(batch)
        if trainer.balance_batch:
            batch = balance(batch, self._workers.mesh("actor").shares, self._config.actor_rollout_ref.model)
        if self._config.algorithm.rollout_correction.bypass_mode:
            batch = batch.with_(old_log_probs=batch["rollout_log_probs"])
        return batch, {
            **metrics,
            **validation.extras(scores, "reward"),
            "reward/accuracy": scores.right().mean().item(),
        }

    def responses(self, prompts: Batch, samples: int, purpose: str, step: int, first: int = 0) -> Batch:
        """Generate `samples` responses per prompt, sampled as configured for `purpose` ("train", "val" or "greedy")."""
        spread = steps.spread(prompts, samples, self._state.seed, purpose, step, first)
        sent = environment_rows.sent(self._config, spread)
        written = self._workers.split("rollout", "generate", sent, purpose)
        self._failed.judge(written)
        return environment_rows.received(spread, written, self._tokenizer, self._config.actor_rollout_ref.rollout)

    def scores_of(self, batch: Batch) -> Scores:
        """Score each response with the reward functions, a reward model, its environment, or several of them."""
        model_scores = None
        if has_reward_model(self._config):
            sequences = self._rewards.sequences(batch)
            model_scores = self._workers.split("reward", "scores", sequences)["model_scores"]
        by_functions = partial(self._rewards.score, batch, self._folder / "failed_rewards", model_scores)
        return environment_rows.scores(self._config, batch, by_functions)

    def _drawn(self, step: int, first: int) -> Batch:
        """Return samples of the next prompts; the step has drawn `first` prompts before."""
        with self._progress.phase("rollout"):
            prompts = self._train.batch(self._sampler.next())
            batch = self.responses(prompts, self._config.actor_rollout_ref.rollout.n, "train", step, first)
            greedy = None
            if "greedy_scores" in ESTIMATORS[self._config.algorithm.adv_estimator].reads:
                greedy = self.responses(prompts, 1, "greedy", step, first)
        if greedy is None:
            return batch
        with self._progress.phase("reward"):
            overlong = self._config.reward.overlong_buffer
            baseline = sample_selection.with_scores(greedy, self.scores_of(greedy), overlong)["scores"]
            return batch.with_(greedy_scores=baseline[batch["group_id"] - first])

    def _scored(self, batch: Batch) -> sample_selection.Part:
        with self._progress.phase("reward"):
            scores = self.scores_of(batch)
            return sample_selection.with_scores(batch, scores, self._config.reward.overlong_buffer), scores


class Validation:
    """Validates a run.

    Args:
        config: the tree.
        samples: generates and scores responses.
        val: prompts; needed if there is a validation.
        folder: of the run.
        progress, tracker: show and keep responses.
        state: of the run.

    Attributes:
        last: metrics of the last validation, with its step.
    """

    def __init__(
        self,
        config: PPOConfig,
        samples: SampleSource,
        val: PromptDataset | None,
        folder: Path,
        progress: Progress,
        tracker: Tracker,
        state: RunState,
    ):
        self._config, self._samples, self._val, self._folder = config, samples, val, folder
        self._progress, self._tracker, self._state = progress, tracker, state
        self.last: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """Score the policy on held-out prompts, keep its responses, and return the metrics."""
        val, trainer = self._config.actor_rollout_ref.rollout.val_kwargs, self._config.trainer
        samples = val.n if val.do_sample else 1  # greedy samples of a prompt are equal
        parts: list[sample_selection.Part] = []
        assert self._val is not None, "loaded if the configuration asks for a validation"
        with self._progress.phase("validate"):
            for rows in validation.chunks(len(self._val), self._config.data.val_batch_size):
                batch = self._samples.responses(self._val.batch(rows), samples, "val", step=0, first=rows[0])
                parts.append((batch, self._samples.scores_of(batch)))
        batch, scores = sample_selection.join(parts)
        records, step = validation.generations(batch, scores), self._state.finished_steps
        folder = trainer.validation_data_dir
        validation.dump(records, Path(folder) if folder else self._folder / "validation", step)
        if shown := records[: trainer.log_val_generations]:
            self._progress.generations(shown)
            self._tracker.generations(shown, step)
        measured = validation.summarise(batch, scores) | validation.over_samples(batch, scores, samples)
        self.last = measured | {"step": float(step)}
        self._state.first_validation = self._state.first_validation or self.last
        return measured
