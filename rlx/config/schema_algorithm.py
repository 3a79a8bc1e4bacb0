"""The keys of `algorithm`: advantages and KL. The whole tree is in `schema.py`."""

from dataclasses import dataclass

from rlx.config.keys import group, key

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


@dataclass(frozen=True)
class KLControlConfig:
    type: str = key("fixed", "adaptive: the coefficient follows the measured KL.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "First coefficient.", minimum=0)
    horizon: int = key(10000, "Adaptive: samples over which it adapts.", minimum=1)
    target_kl: float = key(0.1, "Adaptive: KL aimed at.", exclusive_minimum=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key("gae", "Advantage estimator: gae (PPO with a critic) or grpo.", choices=("gae", "grpo"))
    gamma: float = key(1.0, "Discount.", minimum=0, maximum=1)
    lam: float = key(1.0, "GAE's lambda.", minimum=0, maximum=1)
    norm_adv_by_std_in_grpo: bool = key(True, "Divide by the group's standard deviation; False is Dr.GRPO's form.")
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference from each token's reward.")
    kl_penalty: str = key("kl", "Its estimator.", choices=KL_ESTIMATORS)
    kl_ctrl: KLControlConfig = group(KLControlConfig, "Its coefficient.")
