"""The keys of `algorithm`: advantages, KL, the sampler's mismatch. The whole tree is in `schema.py`."""

from dataclasses import dataclass

from rlx.config.keys import group, key

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


@dataclass(frozen=True)
class KLControlConfig:
    type: str = key("fixed", "adaptive: the coefficient follows the measured KL.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "First coefficient.", minimum=0)
    horizon: int = key(10000, "Adaptive: samples over which it adapts.", minimum=1)
    target_kl: float = key(0.1, "Adaptive: KL aimed at.", exclusive_minimum=0)


REJECTIONS = ("token_k1", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k2")


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What the policy loss does about the sampler's mismatch with the trainer; docs/rollout.md has the formulas."""

    rollout_is: str | None = key(
        None,
        "Importance weights, trainer's over sampler's probability, of each token or of the sequence; null: none.",
        choices=(None, "token", "sequence"),
    )
    rollout_is_threshold: str = key(
        "2.0",
        "A number caps the weights (TIS); low_high, such as 0.5_5.0, sets those outside to 0 (IcePop).",
        bounds=True,
    )
    rollout_is_batch_normalize: bool = key(False, "Divide the weights by their mean over the batch.")
    rollout_rs: tuple[str, ...] | None = key(
        None,
        "Leave out tokens or sequences whose ratio fails these tests: each token's, the sequence's product, its geometric "
        "mean, its mean k3 or its largest k2; null: none.",
        choices=(None, *REJECTIONS),
    )
    rollout_rs_threshold: tuple[str, ...] | None = key(
        None, "One for all of rollout_rs or one each; for k1 low_high or high, which means 1/high_high.", bounds=True
    )
    rollout_token_veto_threshold: float | None = key(
        None, "Leave out sequences with a token of a smaller ratio, such as 1e-4.", exclusive_minimum=0, maximum=1
    )
    bypass_mode: bool = key(False, "Take the sampler's log-probs as the old ones and leave their phase out.")

    @property
    def rejects(self) -> bool:
        """Whether any token may be left out of the loss."""
        return bool(self.rollout_rs) or self.rollout_token_veto_threshold is not None


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key("gae", "Advantage estimator: gae (PPO with a critic) or grpo.", choices=("gae", "grpo"))
    gamma: float = key(1.0, "Discount.", minimum=0, maximum=1)
    lam: float = key(1.0, "GAE's lambda.", minimum=0, maximum=1)
    norm_adv_by_std_in_grpo: bool = key(True, "Divide by the group's standard deviation; False is Dr.GRPO's form.")
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference from each token's reward.")
    kl_penalty: str = key("kl", "Its estimator.", choices=KL_ESTIMATORS)
    kl_ctrl: KLControlConfig = group(KLControlConfig, "Its coefficient.")
    rollout_correction: RolloutCorrectionConfig = group(
        RolloutCorrectionConfig, "Correction of the sampler's mismatch with the trainer."
    )
