"""The keys of `algorithm`, and those of the policy loss and the length penalty. The whole tree is in `rlx.config.schema`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlx.config.schema.keys import (
    Bounds,
    Need,
    beside,
    group,
    in_state,
    is_above,
    key,
    needs,
    read_bounds,
    while_is,
    without,
)

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_LOSS_ESTIMATORS = (*KL_ESTIMATORS, "kl+", "k1+", "abs+", "low_var_kl+", "k3+")


@dataclass(frozen=True)
class KLControlConfig:
    type: str = key("fixed", "adaptive: the coefficient follows the measured KL.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "First coefficient.", minimum=0)
    horizon: int = key(10000, "Adaptive: samples over which it adapts.", while_is("type", "fixed"), minimum=1)
    target_kl: float = key(0.1, "Adaptive: target KL per token [nats].", while_is("type", "fixed"), above=0)


CORRECTS = needs("corrections need the sampler's log-probs", "actor_rollout_ref.rollout.calculate_log_probs", True)
REJECTIONS = ("token_k1", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k2")


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """How the policy loss corrects the sampler's mismatch with the trainer; docs/rollout.md has the formulas."""

    rollout_is: str | None = key(
        None,
        "Importance weights, trainer's over sampler's probability; null: none.",
        CORRECTS,
        choices=(None, "token", "sequence"),
    )
    rollout_is_threshold: str = key(
        "2.0",
        "A number caps the weights (TIS); low_high sets those outside to 0 (IcePop).",
        while_is("rollout_is", None),
        bounds=True,
    )
    rollout_is_batch_normalize: bool = key(False, "Divide the weights by their mean.", while_is("rollout_is", None))
    rollout_rs: tuple[str, ...] | None = key(
        None, "Tests that a token's or a sequence's ratio must pass; null: none.", CORRECTS, choices=(None, *REJECTIONS)
    )
    rollout_rs_threshold: tuple[str, ...] | None = key(
        None,
        "One for all tests or one each; for k1 low_high, or high for 1/high_high.",
        without("rollout_rs"),
        bounds=True,
    )
    rollout_token_veto_threshold: float | None = key(
        None, "Leave out sequences with a token below this ratio.", CORRECTS, above=0, maximum=1
    )
    bypass_mode: bool = key(
        False,
        "Take the sampler's log-probs as the old ones.",
        CORRECTS,
        *(
            needs("bypass_mode computes no old log-probs, which corrections need", other, None)
            for other in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")
        ),
    )

    @property
    def weight_bounds(self) -> Bounds:
        return read_bounds(self.rollout_is_threshold)

    @property
    def rejects(self) -> bool:
        return bool(self.rollout_rs) or self.rollout_token_veto_threshold is not None


class Rejection(NamedTuple):
    """One test of rollout_rs and its bounds."""

    criterion: str
    bounds: Bounds


def rejections(correction: RolloutCorrectionConfig) -> list[Rejection]:
    """Return the tests that a token or its sequence must pass. Raises ValueError if the numbers of bounds and tests differ."""
    criteria, texts = correction.rollout_rs or (), correction.rollout_rs_threshold or ()
    shared = texts * len(criteria) if len(texts) == 1 else texts
    return [Rejection(*pair) for pair in zip(criteria, map(read_bounds, shared), strict=True)]


def two_samples(what: str, when: Callable[[Any], bool], example: int) -> Need:
    need = needs(what, "actor_rollout_ref.rollout.n", when=when, expected=" >= 2", example=example)
    return need._replace(met=is_above(1))


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: replace prompts whose samples are all equally good, because they teach nothing."""

    enable: bool = key(
        False,
        "Generate until the samples of all prompts differ in `metric`.",
        two_samples("a single response to a prompt differs from none", bool, example=8),
    )
    metric: str = key("acc", "acc, score, seq_reward, seq_final_reward, or a number that the reward function reports.")
    max_num_gen_batches: int = key(10, "Generations of a step after which the run stops; 0: no limit.", minimum=0)


CRITIC, GREEDY, GROUPS = "critic", "greedy", "groups"
GAMMA, LAM, NORM_BY_STD = "gamma", "lam", "norm_adv_by_std_in_grpo"
TIME_STEP = "time_step"

ADV_ESTIMATORS: dict[str, tuple[str, ...]] = {
    "gae": (CRITIC, GAMMA, LAM, TIME_STEP),
    "grpo": (GROUPS, NORM_BY_STD),
    "grpo_passk": (GROUPS, NORM_BY_STD),
    "rloo": (GROUPS,),
    "opo": (GROUPS,),
    "reinforce_plus_plus": (GAMMA, TIME_STEP),
    "reinforce_plus_plus_baseline": (GROUPS,),
    "remax": (GREEDY,),
}
"""The advantage estimators, each with its needs besides rewards (a critic, other samples of the prompt, its greedy response)
and the keys of `algorithm` that it reads."""


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key(
        "gae",
        "Advantage estimator; gae (PPO) has a critic.",
        two_samples(
            "the estimator compares the responses to one prompt", lambda name: GROUPS in ADV_ESTIMATORS.get(name, ()), 5
        ),
        choices=tuple(ADV_ESTIMATORS),
    )
    gamma: float = key(1.0, "Discount; gae and reinforce_plus_plus.", in_state("not read"), minimum=0, maximum=1)
    lam: float = key(1.0, "GAE's lambda.", in_state("not read"), minimum=0, maximum=1)
    time_step: str = key(
        "token",
        "Step of gamma and lam: a token, or a turn, whose tokens share an advantage.",
        in_state("not read"),
        choices=("token", "turn"),
    )
    norm_adv_by_std_in_grpo: bool = key(True, "False is Dr.GRPO: no division by the deviation.", in_state("not read"))
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference from each token's reward.")
    kl_penalty: str = key("kl", "Its estimator.", without("use_kl_in_reward"), choices=KL_ESTIMATORS)
    kl_ctrl: KLControlConfig = group(KLControlConfig, "Its coefficient.", without("use_kl_in_reward"))
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig, "Dynamic sampling.", without("enable"))
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig, "The sampler's mismatch.")

    def needs(self, what: str) -> bool:
        """Whether the advantage estimator needs this, or reads this key."""
        return what in ADV_ESTIMATORS.get(self.adv_estimator, ())


LOSS_MODES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean")


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = key("vanilla", "vanilla: PPO with dual clip; geo_mean: GMPO.", beside("path"), choices=LOSS_MODES)
    path: str | None = key(None, "Python file with a policy loss of your own, in place of loss_mode.", is_path=True)
    name: str = key("policy_loss", "Name: f(log_probs, old_log_probs, advantages, mask, settings).", without("path"))


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft penalty of long responses, subtracted from the score in training."""

    enable: bool = key(False, "Take it off.")
    len: int = key(
        4096, "Last tokens, in which the penalty grows from 0.", minimum=1, at_most="data.max_response_length"
    )
    penalty_factor: float = key(1.0, "Penalty of a response of max_response_length.", minimum=0)
