"""Derive a role's schedule and sampling from the configuration. Pure functions."""

from typing import Any, Literal

from rlx.config.schema import ActorRolloutRefConfig, PPOConfig
from rlx.config.schema.roles import asks_for_experts
from rlx.engine.experts import ExpertOptions
from rlx.rollout.protocol import Sampling

Purpose = Literal["train", "val", "greedy"]
"""Training, validation, or the greedy responses that ReMax compares training responses with."""


def optimizer_steps(config: PPOConfig, role: Literal["actor", "critic"]) -> int:
    """Return the optimizer steps of the whole run, for the actor without those of the critic's warm-up.

    `trainer.total_training_steps` must be set.
    """
    settings = config.actor_rollout_ref.actor if role == "actor" else config.critic
    steps = config.trainer.total_training_steps
    assert steps is not None and settings.ppo_mini_batch_size is not None and settings.ppo_epochs is not None
    if role == "actor":
        steps = max(0, steps - config.trainer.critic_warmup)
    return steps * (config.data.train_batch_size // settings.ppo_mini_batch_size) * settings.ppo_epochs


def expert_options(policy: ActorRolloutRefConfig) -> ExpertOptions | None:
    """Return what the actor does with experts; None if no key asks for anything."""
    actor = policy.actor
    options = ExpertOptions(actor.router_replay.mode == "R3", actor.router_aux_loss_coef)
    return options if asks_for_experts(policy) else None


def sampling_for(config: PPOConfig, purpose: Purpose, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return how responses are sampled for `purpose`."""
    rollout = config.actor_rollout_ref.rollout
    length, val = config.data.max_response_length, rollout.val_kwargs
    ends: dict[str, Any] = {
        "stop_token_ids": () if rollout.ignore_eos else stop_token_ids,
        "stop": rollout.stop,
        "include_stop_str_in_output": rollout.include_stop_str_in_output,
    }
    if purpose == "train":
        cut = rollout.temperature, rollout.top_p, rollout.top_k or -1
        logs, experts = rollout.calculate_log_probs, rollout.enable_rollout_routing_replay
        return Sampling(length, *cut, with_log_probs=logs, with_experts=experts, **ends)
    silent: dict[str, Any] = {"with_log_probs": False, **ends}
    if purpose == "greedy":
        return Sampling(length, temperature=0.0, **silent)
    silent |= {
        "repetition_penalty": val.repetition_penalty,
        "presence_penalty": val.presence_penalty,
        "frequency_penalty": val.frequency_penalty,
        "bad_words": val.bad_words,
        "logit_bias": tuple((int(token), float(bias)) for token, bias in val.logit_bias.items()),
    }
    if not val.do_sample:
        return Sampling(length, temperature=0.0, **silent)
    return Sampling(length, val.temperature, val.top_p, val.top_k or -1, min_p=val.min_p, **silent)
