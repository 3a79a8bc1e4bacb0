"""The root of the typed tree."""

from dataclasses import dataclass

from rlx.config.schema.algorithm import AlgorithmConfig
from rlx.config.schema.data import DataConfig
from rlx.config.schema.environment import EnvironmentConfig
from rlx.config.schema.keys import group
from rlx.config.schema.reward import CustomRewardConfig, RewardConfig, RewardModelConfig
from rlx.config.schema.trainer import RayConfig, TrainerConfig, WarmStartConfig
from rlx.config.schema.training import ActorRolloutRefConfig, CriticConfig


@dataclass(frozen=True)
class PPOConfig:
    """The whole tree."""

    data: DataConfig = group(DataConfig, "Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig, "Policy, generation, reference.")
    critic: CriticConfig = group(CriticConfig, "Value model, used by gae.")
    environment: EnvironmentConfig = group(EnvironmentConfig, "Tools and environments: conversations of several turns.")
    reward: RewardConfig = group(RewardConfig, "Reward functions and the processes they run in.")
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig, "A reward function of your own.")
    reward_model: RewardModelConfig = group(RewardModelConfig, "A model that scores responses.")
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "Advantages, KL, the sampler's mismatch.")
    trainer: TrainerConfig = group(TrainerConfig, "The loop.")
    warm_start: WarmStartConfig = group(WarmStartConfig, "Making `builtin:tiny`.")
    ray_kwargs: RayConfig = group(RayConfig, "Ray.")
