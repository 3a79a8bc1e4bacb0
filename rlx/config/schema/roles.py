"""The roles of a run, the values that their null keys take, and one view of all roles for the rules."""

from dataclasses import replace
from typing import Literal, NamedTuple

from rlx.config.schema import (
    CRITIC,
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    PPOConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)

TINY, ULYSSES = "builtin:tiny", "ulysses_sequence_parallel_size"


class MicroSize(NamedTuple):
    """Samples per forward and process, or tokens with dynamic batch sizes; the other is None."""

    rows: int | None
    tokens: int | None


class ModelRole(NamedTuple):
    """A model under FSDP."""

    name: str  # actor, critic, ref or reward
    # Prefixes of the keys of its update or log-probs, of its model and of its sharding
    key: str
    model_key: str
    fsdp_key: str
    model: ModelConfig
    fsdp: FSDPConfig
    strategy: str
    mini_batch_prompts: int
    micro: MicroSize  # size of a forward on one process
    trained: bool  # whether it has gradients and an optimizer
    sequence_parallel_size: int = 1  # processes that share each sequence
    optimizer_bytes: float | None = None  # of its state for a weight; None: two numbers of the weight's type

    @property
    def head(self) -> Literal["lm", "value", "score"]:
        return "value" if self.name == "critic" else "score" if self.name == "reward" else "lm"

    @property
    def strategy_key(self) -> str:
        """The key of `strategy`; the reference has the actor's."""
        return f"{self.key}.strategy" if self.name != "ref" else "actor_rollout_ref.actor.strategy"


def has_critic(config: PPOConfig) -> bool:
    """Whether there is a critic; a validation alone needs none."""
    return config.algorithm.needs(CRITIC) and not config.trainer.val_only


def has_reference(config: PPOConfig) -> bool:
    asks = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return asks and not config.trainer.val_only


def has_reference_model(config: PPOConfig) -> bool:
    """Whether the reference policy is a model of its own; with adapters it is the actor without them."""
    return has_reference(config) and config.actor_rollout_ref.model.lora_rank == 0


def has_environment(config: PPOConfig) -> bool:
    return config.environment.name is not None or config.environment.path is not None


def only_environment_scores(config: PPOConfig) -> bool:
    """Whether an environment's rewards replace those of reward functions and models."""
    return has_environment(config) and config.environment.rewards == "replace"


def has_reward_model(config: PPOConfig) -> bool:
    return config.reward_model.enable


def model_scores_alone(config: PPOConfig) -> bool:
    return has_reward_model(config) and config.reward_model.rule_weight == 0


def roles_of(config: PPOConfig) -> list[str]:
    """Return the roles that the workers host, in the order in which they are built."""
    others = {"ref": has_reference_model, "critic": has_critic, "reward": has_reward_model}
    return ["actor", "rollout", *(name for name, has in others.items() if has(config))]


def pools_of_roles(config: PPOConfig) -> dict[str, int]:
    """Return the pool of processes that hosts each role; the first one trains."""
    return {role: int(role == "rollout" and config.trainer.n_rollout_gpus > 0) for role in roles_of(config)}


def sampling_processes(config: PPOConfig) -> int:
    return config.trainer.nnodes * config.trainer.samplers_per_node


def is_tiny(config: PPOConfig) -> bool:
    return config.actor_rollout_ref.model.path == TINY


def critic_settings(config: PPOConfig) -> CriticConfig:
    """Return the critic's subtree with the actor's values in place of nulls.

    If it takes the actor's path, it also takes the actor's keys for loading, unless its own differ from the defaults.
    """
    policy, critic = config.actor_rollout_ref, config.critic
    inherited = ("strategy", "ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", ULYSSES)
    filled = {name: getattr(policy.actor, name) for name in inherited if getattr(critic, name) is None}
    if critic.model.path is None:
        default = ModelConfig()
        loading = ("override_config", "trust_remote_code", "attn_implementation", "experts_implementation")
        same = [name for name in loading if getattr(critic.model, name) == getattr(default, name)]
        filled["model"] = replace(critic.model, **{name: getattr(policy.model, name) for name in ("path", *same)})
    if critic.ppo_micro_batch_size_per_gpu is None and not critic.use_dynamic_bsz:
        sizes = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
        filled |= {name: getattr(policy.actor, name) for name in sizes}
    return replace(critic, **filled)


def update_size(settings: ActorConfig | CriticConfig) -> MicroSize:
    """Return the size of an update's forward and backward; the critic's nulls must be set."""
    if settings.use_dynamic_bsz:
        return MicroSize(None, settings.ppo_max_token_len_per_gpu)
    return MicroSize(settings.ppo_micro_batch_size_per_gpu, None)


def log_prob_size(settings: RolloutConfig | RefConfig, actor: ActorConfig) -> MicroSize:
    """Return the size of a forward for log-probs: by default that of the actor's update."""
    if settings.log_prob_use_dynamic_bsz:
        return MicroSize(None, settings.log_prob_max_token_len_per_gpu)
    rows = settings.log_prob_micro_batch_size_per_gpu
    return update_size(actor) if rows is None else MicroSize(rows, None)


def _optimizer_bytes(optim: OptimConfig, fsdp: FSDPConfig, model: ModelConfig) -> float | None:
    if model.lora_rank:
        return None  # adapters are fp32
    if optim.optimizer == "AdamW8bit":
        return 2 * (1 + 4 / 256)  # a scale in fp32 for each 256 numbers
    has_masters = optim.optimizer == "AdamW" and optim.master_weights and fsdp.model_dtype == "bf16"
    return 12 if has_masters else None  # an fp32 master and two fp32 moments


def _trained_role(
    name: str, keys: tuple[str, str, str], settings: ActorConfig | CriticConfig, model: ModelConfig, fsdp: FSDPConfig
) -> ModelRole:
    assert settings.strategy is not None and settings.ppo_mini_batch_size is not None, "the actor's are never null"
    return ModelRole(
        name,
        *keys,
        model=model,
        fsdp=fsdp,
        strategy=settings.strategy,
        mini_batch_prompts=settings.ppo_mini_batch_size,
        micro=update_size(settings),
        trained=True,
        sequence_parallel_size=settings.ulysses_sequence_parallel_size or 1,
        optimizer_bytes=_optimizer_bytes(settings.optim, fsdp, model),
    )


def actor_role(config: PPOConfig) -> ModelRole:
    policy, key = config.actor_rollout_ref, "actor_rollout_ref.actor"
    keys = (key, "actor_rollout_ref.model", f"{key}.fsdp_config")
    role = _trained_role("actor", keys, policy.actor, policy.model, policy.actor.fsdp_config)
    return role._replace(trained=not config.trainer.val_only or policy.model.lora_rank > 0)


def critic_role(config: PPOConfig) -> ModelRole:
    critic = critic_settings(config)
    return _trained_role("critic", ("critic", "critic.model", "critic.fsdp"), critic, critic.model, critic.fsdp)


def reference_role(config: PPOConfig) -> ModelRole:
    ref, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    return actor_role(config)._replace(
        name="ref",
        key="actor_rollout_ref.ref",
        fsdp_key="actor_rollout_ref.ref.fsdp_config",
        fsdp=ref.fsdp_config,
        micro=log_prob_size(ref, actor),
        trained=False,
        sequence_parallel_size=ref.ulysses_sequence_parallel_size or actor.ulysses_sequence_parallel_size,
    )


def reward_model(config: RewardModelConfig) -> ModelConfig:
    """Return the model to load as reward model; it is never trained, so nothing is recomputed."""
    own = {name: value for name, value in vars(config.model).items() if name != "fsdp_config"}
    return ModelConfig(**own, enable_gradient_checkpointing=False)


def reward_role(config: PPOConfig) -> ModelRole:
    settings, actor = config.reward_model, config.actor_rollout_ref.actor
    rows, tokens = settings.micro_batch_size_per_gpu, settings.forward_max_token_len_per_gpu
    micro = MicroSize(None, tokens) if settings.use_dynamic_bsz else MicroSize(rows, None)
    return ModelRole(
        name="reward",
        key="reward_model",
        model_key="reward_model.model",
        fsdp_key="reward_model.model.fsdp_config",
        model=reward_model(settings),
        fsdp=settings.model.fsdp_config,
        strategy=settings.strategy or actor.strategy,
        mini_batch_prompts=config.data.train_batch_size,
        micro=update_size(actor) if micro == (None, None) else micro,
        trained=False,
    )


def has_frozen_layers(role: ModelRole) -> bool:
    return not role.trained or role.model.lora_rank > 0


def trained_roles(config: PPOConfig) -> list[ModelRole]:
    return [actor_role(config), *([critic_role(config)] if has_critic(config) else [])]


def asks_for_experts(policy: ActorRolloutRefConfig) -> bool:
    """Whether the experts of the policy, a mixture of experts, are recorded, replayed or balanced."""
    return policy.rollout.enable_rollout_routing_replay or policy.actor.router_aux_loss_coef > 0


def sharded_roles(config: PPOConfig) -> list[ModelRole]:
    reference = [reference_role(config)] if has_reference_model(config) else []
    judge = [reward_role(config)] if has_reward_model(config) else []
    return [*trained_roles(config), *reference, *judge]


class LogProbPass(NamedTuple):
    """The prompts whose samples take a pass for old log-probs, before the step's updates, and why."""

    prompts: int
    why: str


def takes_sampled_log_probs(config: PPOConfig) -> bool:
    """Return whether the sampler's log-probs are the old ones."""
    return config.algorithm.rollout_correction.bypass_mode or config.actor_rollout_ref.rollout.exact


def log_prob_pass(config: PPOConfig, step: int = 1) -> LogProbPass:
    """Return which samples of a step take a pass for old log-probs.

    The first update has the weights that sampled. Its own forward gives those of its mini-batch, unless numbers are needed before.
    """
    algorithm, policy, size = config.algorithm, config.actor_rollout_ref, config.data.train_batch_size
    correction, by_sequence = algorithm.rollout_correction, algorithm.rollout_correction.rollout_is == "sequence"
    if takes_sampled_log_probs(config):
        return LogProbPass(0, f"{'bypass_mode' if correction.bypass_mode else 'rollout.exact'} takes the sampler's")
    forks = has_environment(config) and policy.rollout.multi_turn.on_rewritten_history == "fork"
    normalizes = correction.rollout_is is not None and correction.rollout_is_batch_normalize
    needed_first = {
        "use_kl_in_reward reads them": algorithm.use_kl_in_reward,
        "rollout_rs and the veto reject tokens of a whole mini-batch": correction.rejects,
        "rollout_is_batch_normalize divides by a mean over the batch": normalizes,
        "rollout_is=sequence weighs all rows of a conversation": by_sequence and forks,
        "enable_rollout_routing_replay compares experts": policy.rollout.enable_rollout_routing_replay,
        "the actor is not updated in the critic's warm-up": has_critic(config) and step <= config.trainer.critic_warmup,
    }
    if reasons := [why for why, is_needed in needed_first.items() if is_needed]:
        return LogProbPass(size, "; ".join(reasons))
    return LogProbPass(size - policy.actor.ppo_mini_batch_size, "the first update gives the others")


def prompts_at_once(config: PPOConfig) -> int:
    """Return the number of prompts per generation in training; 1 for a validation, which may have few training prompts."""
    if config.trainer.val_only:
        return 1
    filtered = config.algorithm.filter_groups.enable and config.data.gen_batch_size
    return filtered or config.data.train_batch_size


def validates(config: PPOConfig) -> bool:
    trainer = config.trainer
    return trainer.test_freq > 0 or trainer.val_before_train or trainer.val_only


def saves(config: PPOConfig) -> bool:
    return config.trainer.save_freq > 0 or config.trainer.save_every_minutes is not None


def may_save(config: PPOConfig) -> bool:
    """Whether training may write a checkpoint, if only at its end or when it is told to end."""
    trainer = config.trainer
    return saves(config) or (trainer.save_last and not trainer.val_only) or trainer.save_on_sigterm_s > 0
