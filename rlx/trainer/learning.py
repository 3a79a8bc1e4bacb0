"""What models compute in a step: log-probs and values, advantages, and the updates on them."""

from collections import Counter
from functools import partial

from rlx.algorithms.advantages import ESTIMATORS
from rlx.cluster.group import WorkerGroup
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_reference, has_reference_model
from rlx.data.batch import EXPERTS, SAMPLE_TOKENS, SEQUENCE, Batch
from rlx.data.seeding import seed_for
from rlx.trainer import phases, sampler_mismatch, steps
from rlx.trainer.balancing import balance
from rlx.trainer.forked_conversations import over_samples, with_sample_tokens
from rlx.trainer.progress import Progress
from rlx.trainer.run_state import RunState

Metrics = dict[str, float]

ACTOR_UPDATE = (*SEQUENCE, "old_log_probs", "advantages")
CRITIC_UPDATE = (*SEQUENCE, "values", "returns")


class Learner:
    """Calls the actor, the reference and the critic.

    Args: those of `Trainer`.
    """

    def __init__(self, config: PPOConfig, workers: WorkerGroup, progress: Progress, state: RunState):
        self._config, self._workers, self._progress, self._state = config, workers, progress, state
        reads = ESTIMATORS[config.algorithm.adv_estimator].reads
        reference = ("ref", "log_probs") if has_reference_model(config) else ("actor", "ref_log_probs")
        # Phase -> role and method that computes a column that the estimator, a reward or a loss reads.
        self._others = {"ref": reference} if has_reference(config) else {}
        self._others |= {"values": ("critic", "values")} if "values" in reads else {}

    def log_probs(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Write old_log_probs unless the samples have them, what corrects the sampler's, and what else losses read.

        Return also how far the sampler's log-probs are from these.
        """
        metrics: Metrics = {}
        if "old_log_probs" not in batch:
            with self._progress.phase("old_log_prob"):
                batch = self._extend(batch, "actor", "log_probs", EXPERTS)
                correction = self._config.algorithm.rollout_correction
                batch, metrics = over_samples(batch, partial(sampler_mismatch.compare, correction=correction))
        for phase, (role, method) in self._others.items():
            with self._progress.phase(phase):
                batch = self._extend(batch, role, method)
        return batch, metrics

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Write rewards and advantages, and returns if there is a critic; return the metrics of the KL in the reward."""
        algorithm, controller = self._config.algorithm, self._state.kl_controller
        with self._progress.phase("advantages"):
            return over_samples(batch, partial(steps.rewarded, algorithm=algorithm, kl_controller=controller))

    def update(self, batch: Batch, step: int) -> Metrics:
        """Take the optimizer steps on this batch: the critic's if there is one, and the actor's after the critic's warm-up."""
        metrics: Metrics = {}
        if "values" in batch:
            critic = self._config.critic
            with self._progress.phase("update_critic"):
                cut = (critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle)
                metrics |= self._update("critic", batch, CRITIC_UPDATE, step, *cut)
        if step > self._config.trainer.critic_warmup:
            actor = self._config.actor_rollout_ref.actor
            replayed = [EXPERTS] if actor.router_replay.mode == "R3" else []
            optional = (
                *(["ref_log_probs"] if actor.use_kl_loss else []),
                *sampler_mismatch.LOSS_COLUMNS,
                *replayed,
            )
            columns = (*ACTOR_UPDATE, *(name for name in optional if name in batch))
            with self._progress.phase("update_actor"):
                cut = (actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle)
                metrics |= self._update("actor", batch, columns, step, *cut)
        return metrics

    def sync(self, updates: int = 1) -> None:
        """Send the actor's weights to the sampler, `updates` after those that it has."""
        version = self._state.policy_version + updates
        self._workers.broadcast("rollout", "sync", version)
        self._state.policy_version = version

    def account(self, step: int, batch: Batch, metrics: Metrics) -> Metrics:
        """Return counters and resource use at the end of a step, and show notices."""
        skipped = sum(metrics.get(f"{role}/skipped", 0) for role in ("actor", "critic"))
        self._state.skipped_steps += int(skipped)
        if skipped:
            self._progress.notice(f"step {step}: {skipped:.0f} optimizer step(s) skipped: the gradient was not finite")
        usage = self._workers.broadcast("process", "usage")
        return {
            "train/skipped_steps": float(self._state.skipped_steps),
            "train/policy_version": float(self._state.policy_version),
            "perf/tokens": float(batch["attention_mask"].sum()),
            **(steps.resource_use(usage) | steps.sampler_load(usage)),
            **phases.memory_of(usage),
            **phases.memory_on_host(usage),
        }

    def memory_of(self, phase: str) -> Metrics:
        """Return the memory before and after a phase that has just ended outside a step."""
        return phases.memory_of(self._workers.broadcast("process", "usage"), [phase])

    def _extend(self, batch: Batch, role: str, method: str, *optional: str) -> Batch:
        """Return the batch with the columns that the role computes from the sequences, and from optional columns."""
        sent = batch.select(*SEQUENCE, *(name for name in optional if name in batch))
        answer = self._workers.split(role, method, sent)
        return batch.with_(**answer.tensors)

    def _update(
        self, role: str, batch: Batch, columns: tuple[str, ...], step: int, prompts: int, epochs: int, shuffle: bool
    ) -> Metrics:
        """Take one optimizer step per mini-batch and epoch; return their mean metrics and the number of skipped steps.

        Metrics of a skipped step are not finite and do not enter the means. A mini-batch without a token in the loss gets no
        step, because weight decay and momentum would still move the weights.
        """
        counted = "loss_mask" if "loss_mask" in columns else "response_mask"
        batch = with_sample_tokens(batch, counted)
        columns = (*columns, *([SAMPLE_TOKENS] if SAMPLE_TOKENS in batch else []))
        seed = seed_for(self._state.seed, "mini-batches", role, step) if shuffle else None
        model = self._config.critic.model if role == "critic" else self._config.actor_rollout_ref.model
        each: list[Metrics] = []
        unused: Counter[str] = Counter()
        for part in steps.mini_batches(batch, prompts, epochs, seed):
            if self._config.trainer.balance_batch:
                part = balance(part, self._workers.mesh(role).shares, model)
            if part[counted].any():
                each.append(self._workers.split_metrics(role, "update", part.select(*columns)))
            else:
                is_empty = not part["response_mask"].any()
                why = "no response has any token in" if is_empty else "rollout_correction rejected every token of"
                unused[why] += 1
        for why, count in unused.items():
            of = f"{count} of {unused.total() + len(each)} mini-batches"
            self._progress.notice(f"step {step}: {why} {of}, so they give no optimizer step")
        if not each:
            return {f"{role}/skipped": 0.0}
        each, measured = sampler_mismatch.split_off(each)
        means = {name: steps.finite_mean([m[name] for m in each]) for name in each[0]}
        means[f"{role}/skipped"] = sum(m[f"{role}/skipped"] for m in each)
        return means | measured
