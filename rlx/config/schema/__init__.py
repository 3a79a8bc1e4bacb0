"""The typed configuration tree: every key, its type, default, range and meaning.

It imports only the standard library, so every package may import it. `rlx.config.compose` reads YAML and applies overrides;
`rlx.config.check` holds cross-field rules. Keys that verl also has keep its names and meanings.
"""

from dataclasses import dataclass

from rlx.config.schema.algorithm import (
    ADV_ESTIMATORS,
    CRITIC,
    GAMMA,
    GREEDY,
    GROUPS,
    KL_ESTIMATORS,
    KL_LOSS_ESTIMATORS,
    LAM,
    LOSS_MODES,
    NORM_BY_STD,
    REJECTIONS,
    TIME_STEP,
    AlgorithmConfig,
    FilterGroupsConfig,
    KLControlConfig,
    OverlongBufferConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    rejections,
)
from rlx.config.schema.data import (
    ARITHMETIC,
    PLAIN_SOURCE,
    TRUNCATIONS,
    ArithmeticConfig,
    CustomClassConfig,
    DataConfig,
)
from rlx.config.schema.keys import group, in_state, without
from rlx.config.schema.model import (
    LARGEST_SEED,
    MODEL_JSON_FILES,
    TOKENIZER_FILES,
    ActivationOffloadConfig,
    LoraConfig,
    ModelConfig,
    TinyModelConfig,
)
from rlx.config.schema.reward import (
    FORMS,
    NOT_CALLED,
    CustomRewardConfig,
    RewardConfig,
    RewardManagerConfig,
    RewardModelConfig,
    RewardModelSourceConfig,
)
from rlx.config.schema.rollout import (
    TOOL_FORMATS,
    EngineKwargsConfig,
    EnvironmentConfig,
    MultiTurnConfig,
    RolloutConfig,
    ValKwargsConfig,
)
from rlx.config.schema.trainer import LOGGERS, MEMORY_CHECKS, RESUME, RayConfig, TrainerConfig, WarmStartConfig
from rlx.config.schema.training import (
    AGGREGATIONS,
    CHECKPOINT_CONTENTS,
    DTYPES,
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointConfig,
    CriticConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    OptimConfig,
    RefConfig,
)


@dataclass(frozen=True)
class PPOConfig:
    """The whole tree."""

    data: DataConfig = group(DataConfig, "Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig, "Policy, generation, reference.")
    critic: CriticConfig = group(CriticConfig, "Value model, used by gae.")
    environment: EnvironmentConfig = group(EnvironmentConfig, "Multi-turn conversations.", in_state("no environment"))
    reward: RewardConfig = group(RewardConfig, "Reward functions and the processes they run in.")
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig, "Your own reward function.", *NOT_CALLED)
    reward_model: RewardModelConfig = group(RewardModelConfig, "A model that scores responses.", without("enable"))
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "Advantages, KL, the sampler's mismatch.")
    trainer: TrainerConfig = group(TrainerConfig, "The loop.")
    warm_start: WarmStartConfig = group(WarmStartConfig, "Making `builtin:tiny`.", in_state("not tiny"))
    ray_kwargs: RayConfig = group(RayConfig, "Ray.")
