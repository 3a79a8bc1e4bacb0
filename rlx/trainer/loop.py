"""The training loop: prompts, rollout, rewards, log-probs and values, advantages, updates, weights to the sampler."""

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NoReturn

from transformers import PreTrainedTokenizerBase

from rlx.algorithms.kl import KLController
from rlx.cluster.group import WorkerGroup
from rlx.config.schema import GREEDY, PPOConfig
from rlx.config.schema.roles import has_critic, has_reference, has_reference_model, has_reward_model, trained_roles
from rlx.data.batch import EXPERTS, SAMPLE_TOKENS, SEQUENCE, Batch
from rlx.data.prompts import PromptDataset
from rlx.data.sampler import PromptSampler
from rlx.data.seeding import seed_for
from rlx.rewards.manager import RewardManager, Scores
from rlx.supervisor.link import tell
from rlx.supervisor.stopping import Stopping, Terminated
from rlx.trainer import branches, conversations, memory, mismatch, sample_selection, steps, transcripts, validation
from rlx.trainer.balancing import balance
from rlx.trainer.checkpoints import (
    SUPERSEDED,
    DriverState,
    nothing_to_train,
    read_driver_state,
    require_step,
    set_aside_later,
)
from rlx.trainer.failures import FailedConversations
from rlx.trainer.progress import Progress
from rlx.trainer.saver import Saver, due
from rlx.trainer.tracking import Tracker

Metrics = dict[str, float]

ACTOR_UPDATE = (*SEQUENCE, "old_log_probs", "advantages")
CRITIC_UPDATE = (*SEQUENCE, "values", "returns")


def kl_controller(config: PPOConfig) -> KLController:
    """Return the controller of the KL's weight in the reward."""
    control = config.algorithm.kl_ctrl
    return KLController(control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon)


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
        self.config, self.workers, self.tokenizer = config, workers, tokenizer
        self.train, self.sampler, self.val = train, sampler, val
        self.rewards, self.folder, self.progress, self.tracker = rewards, folder, progress, tracker
        self.saver = Saver(config, workers, folder / "checkpoints")
        self.failed = FailedConversations(config.environment, progress)
        self.kl_controller = kl_controller(config)
        self.seed = config.trainer.seed
        self.last_step = config.trainer.total_training_steps or 0
        self.finished_steps = 0
        self.policy_version = 0
        self.skipped_steps = 0
        self.first_validation: Metrics = {}
        self.last_validation: Metrics = {}

    # The step ---------------------------------------------------------------------------------------------------

    def fit(self, stopping: Stopping | None = None) -> None:
        """Train to the last step; validate and save as configured.

        Args:
            stopping: asked after each step whether the run is to save and end.

        Raises:
            Terminated: the run was to end. A checkpoint was written if there was time.
        """
        trainer = self.config.trainer
        self.sync_weights(self.policy_version)
        if trainer.val_only or (trainer.val_before_train and self.finished_steps == 0):
            self.report(self.validate() | self.memory_of("validate"))
        while self.finished_steps < self.last_step and not trainer.val_only:
            tell(step=self.finished_steps + 1)
            with self.progress.step(self.finished_steps + 1) as timings:
                metrics = self.step(self.finished_steps + 1)
                self.finished_steps += 1
                if due(trainer.test_freq, self.finished_steps, self.last_step):
                    metrics |= self.validate() | self.memory_of("validate")
                if self.saver.is_due(self.finished_steps, self.last_step):
                    with self.progress.phase("checkpoint"):
                        self.saver.begin(self.state())
                    metrics |= self.memory_of("checkpoint")
            metrics |= timings
            outside = sum(timings.get(f"timing_s/{phase}", 0.0) for phase in ("validate", "checkpoint"))
            seconds = timings["timing_s/step"] - outside
            metrics["perf/tokens_per_second"] = metrics["perf/tokens"] / seconds
            metrics["perf/stall_share"] = metrics["perf/stall_ms"] / 1e3 / seconds
            self.report(metrics)
            self.saver.settle()  # after the row, so that a whole checkpoint never lacks one
            if stopping is not None and (left_s := stopping.left_s) is not None:
                self.end_early(left_s)
        self.saver.close()

    def end_early(self, left_s: float) -> NoReturn:
        """Save and copy, if there is time, and raise Terminated.

        Raises:
            StorageError: a copy to object storage failed, or the save did.
        """
        end_s = time.monotonic() + left_s
        if left_s > 0 and (saved := self.saver.save_now(self.state(), left_s)):
            tell(saved=str(saved))
            self.saver.wait_for_copies(max(0.0, end_s - time.monotonic()))
        raise Terminated

    def step(self, step: int) -> Metrics:
        """Generate samples for a batch of prompts, take the optimizer steps on them, and return the step's metrics."""
        phase, config = self.progress.phase, self.config
        epoch = self.sampler.epoch
        (batch, scores), drawn = self.samples(step)
        if config.trainer.rollout_data_dir:
            validation.dump(validation.generations(batch, scores), Path(config.trainer.rollout_data_dir), step)
        batch = branches.all_rows(batch)
        if config.trainer.balance_batch:
            batch = balance(batch, self.workers.mesh("actor").shares, config.actor_rollout_ref.model)
        batch, compared = self.old_log_probs(batch)
        if has_reference(config):
            with phase("ref"):
                own = ("ref", "log_probs") if has_reference_model(config) else ("actor", "ref_log_probs")
                batch = self.extend(batch, *own)
        if has_critic(config):
            with phase("values"):
                batch = self.extend(batch, "critic", "values")
        with phase("advantages"):
            whole, reward_kl = steps.add_rewards(branches.joined(batch), config.algorithm, self.kl_controller.coef)
            batch = branches.parted(steps.add_advantages(whole, config.algorithm), batch)
        transcripts.keep(config, self.folder, step, batch, self.tokenizer)
        metrics = steps.describe(batch) | conversations.describe(batch) | validation.extras(scores, "reward")
        metrics |= {"reward/accuracy": scores.right().mean().item(), "train/epoch": float(epoch), **drawn, **compared}
        if reward_kl is not None:
            metrics |= {"actor/reward_kl": reward_kl, "actor/reward_kl_coef": self.kl_controller.coef}
            self.kl_controller.update(reward_kl, len(whole))
        if has_critic(config):
            with phase("update_critic"):
                metrics |= self.update_critic(batch, step)
        if step > config.trainer.critic_warmup:
            with phase("update_actor"):
                metrics |= self.update_actor(batch, step)
            with phase("sync"):
                self.sync_weights(self.policy_version + 1)
        return metrics | self.account(step, batch, metrics)

    # Parts of a step ----------------------------------------------------------------------------------------------

    def samples(self, step: int) -> tuple[sample_selection.Part, Metrics]:
        """Return scored samples of train_batch_size prompts; with filter_groups only of prompts whose samples differ.

        With filter_groups it draws prompts until there are enough and drops the surplus; the next step draws others.
        """
        filters, data = self.config.algorithm.filter_groups, self.config.data
        if not filters.enable:
            return self.scored(step, first=0), {}
        found = sample_selection.DynamicSampling(
            filters.metric, data.train_batch_size, self.config.actor_rollout_ref.rollout.n
        )
        while not found.enough:
            if found.generations == filters.max_num_gen_batches > 0:
                raise found.error(step)
            found.add(*self.scored(step, first=found.prompts))
        return found.samples(), found.metrics()

    def scored(self, step: int, first: int) -> sample_selection.Part:
        """Return samples of the next prompts and their scores; the step has drawn `first` prompts before."""
        rollout, overlong = self.config.actor_rollout_ref.rollout, self.config.reward.overlong_buffer
        greedy = None
        with self.progress.phase("rollout"):
            prompts = self.train.batch(self.sampler.next())
            batch = self.generate(prompts, rollout.n, "train", step, first)
            if self.config.algorithm.needs(GREEDY):
                greedy = self.generate(prompts, 1, "greedy", step, first)
        with self.progress.phase("reward"):
            scores = self.score(batch)
            batch = sample_selection.with_scores(batch, scores, overlong)
            if greedy is not None:
                baseline = sample_selection.with_scores(greedy, self.score(greedy), overlong)["scores"]
                batch = batch.with_(greedy_scores=baseline[batch["group_id"] - first])
        return batch, scores

    def generate(self, prompts: Batch, samples: int, purpose: str, step: int, first: int = 0) -> Batch:
        """Generate `samples` responses per prompt, sampled as configured for `purpose` ("train", "val" or "greedy")."""
        spread = steps.spread(prompts, samples, self.seed, purpose, step, first)
        sent = conversations.sent(self.config, spread)
        written = self.workers.split("rollout", "generate", sent, purpose)
        self.failed.judge(written)
        return conversations.received(spread, written, self.tokenizer, self.config.actor_rollout_ref.rollout)

    def score(self, batch: Batch) -> Scores:
        """Score each response with the reward functions, a reward model, its environment, or several of them."""
        model_scores = None
        if has_reward_model(self.config):
            model_scores = self.workers.split("reward", "scores", self.rewards.sequences(batch))["model_scores"]
        by_functions = partial(self.rewards.score, batch, self.folder / "failed_rewards", model_scores)
        return conversations.scores(self.config, batch, by_functions)

    def extend(self, batch: Batch, role: str, method: str, *optional: str) -> Batch:
        """Return the batch with the columns that the role computes from the sequences, and from optional columns."""
        sent = batch.select(*SEQUENCE, *(name for name in optional if name in batch))
        answer = self.workers.split(role, method, sent)
        return batch.with_(**dict(answer.tensors.items()))

    def old_log_probs(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with the old log-probs, and their mismatch with the sampler's."""
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode:
            return batch.with_(old_log_probs=batch["rollout_log_probs"]), {}
        with self.progress.phase("old_log_prob"):
            batch = self.extend(batch, "actor", "log_probs", EXPERTS)
            whole, corrected = mismatch.correct(branches.joined(batch), correction)
            return branches.parted(whole, batch), mismatch.measure(whole) | corrected

    def update_actor(self, batch: Batch, step: int) -> Metrics:
        """Take the policy's optimizer steps on this batch."""
        actor = self.config.actor_rollout_ref.actor
        replayed = [EXPERTS] if actor.router_replay.mode == "R3" else []
        optional = (*(["ref_log_probs"] if actor.use_kl_loss else []), *mismatch.LOSS_COLUMNS, *replayed)
        columns = (*ACTOR_UPDATE, *(name for name in optional if name in batch))
        cut = (actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle)
        return self.update("actor", batch, columns, step, *cut)

    def update_critic(self, batch: Batch, step: int) -> Metrics:
        """Take the critic's optimizer steps on this batch."""
        critic = self.config.critic
        cut = (critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle)
        return self.update("critic", batch, CRITIC_UPDATE, step, *cut)

    def update(
        self, role: str, batch: Batch, columns: tuple[str, ...], step: int, prompts: int, epochs: int, shuffle: bool
    ) -> Metrics:
        """Take one optimizer step per mini-batch and epoch; return their mean metrics and the number of skipped steps.

        Metrics of a skipped step are not finite and do not enter the means. A mini-batch without a token in the loss gets no
        step, because weight decay and momentum would still move the weights.
        """
        counted = "loss_mask" if "loss_mask" in columns else "response_mask"
        batch = branches.with_sample_tokens(batch, counted)
        columns = (*columns, *([SAMPLE_TOKENS] if SAMPLE_TOKENS in batch else []))
        seed = seed_for(self.seed, "mini-batches", role, step) if shuffle else None
        model = self.config.critic.model if role == "critic" else self.config.actor_rollout_ref.model
        each: list[Metrics] = []
        unused: Counter[str] = Counter()
        for part in steps.mini_batches(batch, prompts, epochs, seed):
            if self.config.trainer.balance_batch:
                part = balance(part, self.workers.mesh(role).shares, model)
            if part[counted].any():
                each.append(self.workers.split_metrics(role, "update", part.select(*columns)))
            else:
                is_empty = not part["response_mask"].any()
                unused[
                    "no response has any token in" if is_empty else "rollout_correction rejected every token of"
                ] += 1
        for why, count in unused.items():
            of = f"{count} of {unused.total() + len(each)} mini-batches"
            self.progress.notice(f"step {step}: {why} {of}, so they give no optimizer step")
        if not each:
            return {f"{role}/skipped": 0.0}
        each, measured = mismatch.split_off(each)
        means = {name: steps.finite_mean([m[name] for m in each]) for name in each[0]}
        means[f"{role}/skipped"] = sum(m[f"{role}/skipped"] for m in each)
        return means | measured

    def sync_weights(self, version: int) -> None:
        """Send the actor's weights to the sampler; `version` counts the updates."""
        self.workers.broadcast("rollout", "sync", version)
        self.policy_version = version

    def account(self, step: int, batch: Batch, metrics: Metrics) -> Metrics:
        """Return counters and resource use at the end of a step, and show notices."""
        skipped = sum(metrics.get(f"{role}/skipped", 0) for role in ("actor", "critic"))
        self.skipped_steps += int(skipped)
        if skipped:
            self.progress.notice(f"step {step}: {skipped:.0f} optimizer step(s) skipped: the gradient was not finite")
        usage = self.workers.broadcast("process", "usage")
        return {
            "train/skipped_steps": float(self.skipped_steps),
            "train/policy_version": float(self.policy_version),
            "perf/tokens": float(batch["attention_mask"].sum()),
            **(steps.resource_use(usage) | steps.sampler_load(usage)),
            **memory.of_phases(usage),
            **memory.on_host(usage),
        }

    def memory_of(self, phase: str) -> Metrics:
        """Return the memory before and after a phase that has just ended outside a step."""
        return memory.of_phases(self.workers.broadcast("process", "usage"), [phase])

    def report(self, metrics: Metrics) -> None:
        """Show and keep the metrics of the last finished step."""
        metrics |= self.rewards.usage()
        self.progress.row(metrics, self.finished_steps)
        self.tracker.log(metrics, self.finished_steps)

    # Outside the step ---------------------------------------------------------------------------------------------

    def validate(self) -> Metrics:
        """Score the policy on held-out prompts and keep its responses."""
        val = self.config.actor_rollout_ref.rollout.val_kwargs
        samples = val.n if val.do_sample else 1  # greedy samples of a prompt are equal
        parts: list[tuple[Batch, Scores]] = []
        assert self.val is not None, "loaded if the configuration asks for a validation"
        with self.progress.phase("validate"):
            for rows in validation.chunks(len(self.val), self.config.data.val_batch_size):
                batch = self.generate(self.val.batch(rows), samples, "val", step=0, first=rows[0])
                parts.append((batch, self.score(batch)))
        batch, scores = sample_selection.join(parts)
        records = validation.generations(batch, scores)
        folder = self.config.trainer.validation_data_dir
        validation.dump(records, Path(folder) if folder else self.folder / "validation", self.finished_steps)
        shown = records[: self.config.trainer.log_val_generations]
        if shown:
            self.progress.generations(shown)
            self.tracker.generations(shown, self.finished_steps)
        measured = validation.summarise(batch, scores) | validation.over_samples(batch, scores, samples)
        self.last_validation = measured | {"step": float(self.finished_steps)}
        self.first_validation = self.first_validation or self.last_validation
        return measured

    def load(self, checkpoint: Path, falls_back: bool = False) -> None:
        """Continue from a checkpoint that `Saver` wrote; a run that does so equals one that never stopped.

        Args:
            checkpoint: whole, as far as `newest_whole` can tell. The workers check its tensors before they read them.
            falls_back: take an older one of the run instead of a damaged one, and begin anew if all are damaged.

        Raises:
            ResumeError: it is damaged.
        """
        whole, passed_over = self.saver.undamaged(checkpoint, falls_back)
        for line in passed_over:
            self.progress.notice(line)
        step = require_step(whole) if whole else 0
        self.tracker.rewind(step if whole else -1)
        if not self.config.trainer.val_only and (later := set_aside_later(checkpoint.parent, step)):
            self.progress.notice(
                f"checkpoints of later steps are now in {checkpoint.parent / SUPERSEDED}: {', '.join(later)}"
            )
        if whole is None:
            self.progress.notice("all checkpoints of this run are damaged: it begins anew")
            return
        state = read_driver_state(whole)
        for role in trained_roles(self.config):
            self.workers.broadcast(role.name, "load", str(whole / role.name))
        self.sampler.load_state_dict(state.sampler)
        self.kl_controller.load_state_dict(state.kl_controller)
        self.finished_steps, self.seed = state.step, state.seed
        self.policy_version, self.skipped_steps = state.policy_version, state.skipped_steps
        self.first_validation = state.first_validation
        if state.seed != self.config.trainer.seed:
            self.progress.notice(
                f"trainer.seed={self.config.trainer.seed} has no effect: the resumed run keeps its seed {state.seed}"
            )
        if self.finished_steps >= self.last_step and not self.config.trainer.val_only:
            self.progress.notice(nothing_to_train(self.finished_steps, self.last_step, self.config.trainer))

    def state(self) -> DriverState:
        """Return the driver's own state."""
        return DriverState(
            step=self.finished_steps,
            seed=self.seed,
            policy_version=self.policy_version,
            sampler=self.sampler.state_dict(),
            kl_controller=self.kl_controller.state_dict(),
            skipped_steps=self.skipped_steps,
            first_validation=self.first_validation,
        )
