"""Actor and sampler of a run with adapters, in one process of each rank."""

import torch

from rlx.data.batch import Batch
from rlx.models.loading import load_tokenizer
from rlx.rollout.sampler import StaleSamplerError
from rlx.workers.roles import ActorRole, RolloutRole

CPU = torch.device("cpu")
SEQUENCE = ("input_ids", "attention_mask", "response_mask")
ROLES: list[tuple[ActorRole, RolloutRole]] = []


def start(config) -> None:
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, False)
    actor = ActorRole(config, CPU, tokenizer)
    ROLES.append((actor, RolloutRole(config, CPU, tokenizer, actor)))
    ROLES[-1][1].sync(0)


def step(prompts: Batch, version: int):
    """Samples of the current policy with log-probs of policy and reference, and the sampler's version after an update and a sync."""
    actor, rollout = ROLES[-1]
    batch = rollout.generate(prompts, "train")
    sequences = batch.select(*SEQUENCE)
    for answer in (actor.log_probs(sequences), actor.ref_log_probs(sequences)):
        batch = batch.with_(**answer.tensors)
    advantages = torch.linspace(-1, 1, len(batch))[:, None].expand(-1, batch.response_length).contiguous()
    actor.update(batch.select(*SEQUENCE, "old_log_probs", "ref_log_probs").with_(advantages=advantages))
    rollout.sync(version)
    return batch, rollout.sampler.version


def stale(prompts: Batch) -> str | None:
    """What is said if the sampler loses the weights that an update sends."""
    _, rollout = ROLES[-1]
    takes = rollout.sampler.update_weights
    rollout.sampler.update_weights = lambda weights, version: list(weights)
    try:
        step(prompts, 3)
    except StaleSamplerError as error:
        return str(error)
    finally:
        rollout.sampler.update_weights = takes
    return None


def stop() -> None:
    ROLES.pop()
