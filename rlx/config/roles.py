"""The roles of a run: which it has, what their nulls stand for, and one view of all three for the rules."""

from dataclasses import replace
from typing import NamedTuple

from rlx.config.schema import CriticConfig, FSDPConfig, ModelConfig, PPOConfig

TINY = "builtin:tiny"


class ModelRole(NamedTuple):
    """A model under FSDP.

    Args:
        name: actor, critic or ref.
        key: where its update or its log-probs are configured; `model_key`, `fsdp_key`: where model and sharding are.
        micro_rows: samples per forward and process; None with `micro_tokens`.
        micro_tokens: tokens per forward and process with dynamic batch sizes, else None.
        trained: it has gradients and an optimizer.
    """

    name: str
    key: str
    model_key: str
    fsdp_key: str
    model: ModelConfig
    fsdp: FSDPConfig
    strategy: str
    mini_batch_prompts: int
    micro_rows: int | None
    micro_tokens: int | None
    trained: bool


def has_critic(config: PPOConfig) -> bool:
    """Whether the advantage estimator needs values."""
    return config.algorithm.adv_estimator == "gae"


def has_reference(config: PPOConfig) -> bool:
    """Whether anything is compared with the reference policy."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def is_tiny(config: PPOConfig) -> bool:
    """Whether the policy is the built-in model."""
    return config.actor_rollout_ref.model.path == TINY


def critic_settings(config: PPOConfig) -> CriticConfig:
    """The critic's subtree with the actor's value in place of each null that stands for it."""
    policy, critic = config.actor_rollout_ref, config.critic
    inherited = ("strategy", "ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode")
    filled = {name: getattr(policy.actor, name) for name in inherited if getattr(critic, name) is None}
    if critic.model.path is None:
        filled["model"] = replace(critic.model, path=policy.model.path)
    if critic.ppo_micro_batch_size_per_gpu is None and not critic.use_dynamic_bsz:
        sizes = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
        filled |= {name: getattr(policy.actor, name) for name in sizes}
    return replace(critic, **filled)


def actor_role(config: PPOConfig) -> ModelRole:
    """The policy that is trained."""
    policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    return ModelRole(
        name="actor",
        key="actor_rollout_ref.actor",
        model_key="actor_rollout_ref.model",
        fsdp_key="actor_rollout_ref.actor.fsdp_config",
        model=policy.model,
        fsdp=actor.fsdp_config,
        strategy=actor.strategy,
        mini_batch_prompts=actor.ppo_mini_batch_size,
        micro_rows=actor.ppo_micro_batch_size_per_gpu,
        micro_tokens=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        trained=True,
    )


def critic_role(config: PPOConfig) -> ModelRole:
    """The value model."""
    critic = critic_settings(config)
    assert critic.strategy is not None and critic.ppo_mini_batch_size is not None, "the actor's are never null"
    return ModelRole(
        name="critic",
        key="critic",
        model_key="critic.model",
        fsdp_key="critic.fsdp",
        model=critic.model,
        fsdp=critic.fsdp,
        strategy=critic.strategy,
        mini_batch_prompts=critic.ppo_mini_batch_size,
        micro_rows=critic.ppo_micro_batch_size_per_gpu,
        micro_tokens=critic.ppo_max_token_len_per_gpu if critic.use_dynamic_bsz else None,
        trained=True,
    )


def reference_role(config: PPOConfig) -> ModelRole:
    """The policy that the actor is compared with."""
    ref, actor = config.actor_rollout_ref.ref, actor_role(config)
    own = ref.log_prob_use_dynamic_bsz or ref.log_prob_micro_batch_size_per_gpu is not None
    tokens = ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None
    return actor._replace(
        name="ref",
        key="actor_rollout_ref.ref",
        fsdp_key="actor_rollout_ref.ref.fsdp_config",
        fsdp=ref.fsdp_config,
        micro_rows=ref.log_prob_micro_batch_size_per_gpu if own else actor.micro_rows,
        micro_tokens=tokens if own else actor.micro_tokens,
        trained=False,
    )


def trained_roles(config: PPOConfig) -> list[ModelRole]:
    """The roles with an optimizer."""
    return [actor_role(config), *([critic_role(config)] if has_critic(config) else [])]


def sharded_roles(config: PPOConfig) -> list[ModelRole]:
    """All roles under FSDP."""
    return [*trained_roles(config), *([reference_role(config)] if has_reference(config) else [])]
