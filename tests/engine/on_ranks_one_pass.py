"""Whole updates by the trainer's learner, with log-probs of an update's own forward and with those of a pass before it."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from on_ranks_invariance import CONVERSATION_OF_ROW
from rank_tools import FP64, Gradients, P, R, grouped, make_batch, norms_in_fp64, weights_of

from rlx.cluster.placement import Mesh, share_ranges
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import critic_settings
from rlx.config.schema.tree import with_value
from rlx.data.batch import SEQUENCE, Batch, concat
from rlx.models.loading import load_tokenizer
from rlx.trainer.learning import Learner
from rlx.trainer.progress import Progress
from rlx.trainer.run_state import Run
from rlx.workers.roles import ActorRole, CriticRole, RefRole

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
BASE = {
    **{"data.train_batch_size": 4, "data.max_prompt_length": P, "data.max_response_length": R},
    **{f"{ACTOR}.ppo_mini_batch_size": 4, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3, f"{ACTOR}.fsdp_config": FP64},
    **{f"{ACTOR}.optim.lr": 1e-2, "actor_rollout_ref.ref.fsdp_config": FP64, "critic.fsdp": FP64},
    **{"critic.optim.lr": 1e-2, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2},
    **{"algorithm.adv_estimator": "grpo", "trainer.device": "cpu", "trainer.total_training_steps": 2},
}


def configured(folder, options) -> PPOConfig:
    config = PPOConfig()
    for key, value in {**BASE, f"{MODEL}.path": folder, **options}.items():
        config = with_value(config, key, value)
    return replace(config, critic=critic_settings(config))


class Workers:
    """Roles in the process that also is the driver: each rank computes what the driver would."""

    def __init__(self, config: PPOConfig, together: int):
        cpu, tokenizer = torch.device("cpu"), load_tokenizer(config.actor_rollout_ref.model.path, False)
        self.roles = {"actor": ActorRole(config, cpu, tokenizer)}
        if config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
            self.roles["ref"] = RefRole(config, cpu)
        if config.algorithm.adv_estimator == "gae":
            self.roles["critic"] = CriticRole(config, cpu, tokenizer)
        self._mesh, self.calls = Mesh.of(dist.get_world_size(), together), []

    def mesh(self, role):
        return self._mesh

    def call(self, role, method, *args, batch=None):
        self.calls.append((f"{role}.{method}", 0 if batch is None else len(batch)))
        answering = range(dist.get_world_size()) if batch is None else self._mesh.answering_ranks
        if batch is not None:
            own = share_ranges(len(batch), self._mesh.shares)[self._mesh.share_of_rank[dist.get_rank()]]
            args = (batch.rows(own), *args)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, getattr(self.roles[role], method)(*args))
        return [every[rank] for rank in answering]

    def split(self, role, method, batch):
        return concat(self.call(role, method, batch=batch))


def samples(forks: bool) -> Batch:
    """Four prompts with 3, 2, 1 and 2 samples; with `forks` three of them are one conversation each."""
    batch, drawn = grouped(make_batch()), torch.Generator().manual_seed(5)
    sampled = -5.5 + 0.3 * torch.randn(8, R, generator=drawn, dtype=torch.float64)
    scores = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.25, 1.0])
    columns = {"scores": scores, "greedy_scores": scores.flip(0), "rollout_log_probs": sampled}
    number = [0, 1, 2, 0, 1, 0, 0, 1]
    if forks:
        columns |= {"branch": torch.tensor(number), "scores": scores[[0, 0, 0, 3, 3, 5, 6, 6]]}
    info = {"sample": [0] * 8 if forks else number}
    return batch.select(*SEQUENCE).with_(info, group_id=CONVERSATION_OF_ROW, **columns)


def steps(folder, options, forks=False, first=True):
    """Two steps; without `first` each row has old log-probs before its update, as from a pass over all.

    Returns:
        the calls, the metrics, old_log_probs, the gradients and the weights.
    """
    config, calls, metrics, old = configured(folder, options), [], [], []
    workers = Workers(config, config.actor_rollout_ref.actor.ulysses_sequence_parallel_size)
    engine, progress = workers.roles["actor"].engine, Progress(2, console=False)
    gradients = Gradients(engine)
    learner = Learner(Run(config, workers, None, None, None, None, None, Path(), progress, None))
    with norms_in_fp64():
        for step in (1, 2):
            workers.calls.clear()
            batch = samples(forks)
            if not first:
                batch = batch.with_(**workers.split("actor", "log_probs", batch.select(*SEQUENCE)).tensors)
            with progress.step(step) as timings:
                batch, judged = learner.advantages(learner.log_probs(batch, step))
                batch, updated = learner.update(batch, step)
            calls.append(([*workers.calls], "timing_s/old_log_prob" in timings))
            metrics.append(judged | updated)
            old.append(batch["old_log_probs"].masked_fill(~batch["response_mask"], 0))
            assert "in_update" not in batch
    seen = torch.stack(gradients.seen or [torch.zeros(0)])
    return calls, metrics, torch.stack(old), seen, weights_of(engine)


def both(folder, options, forks=False):
    """The steps with the update's own forward, and with a pass."""
    return [steps(folder, options, forks, first) for first in (True, False)]
