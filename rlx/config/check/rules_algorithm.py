"""Faults of algorithms that cannot work together, and warnings about surprising combinations."""

from collections.abc import Iterator

from rlx.config.check.context import CheckContext, Faults
from rlx.config.schema import NORM_BY_STD, PPOConfig
from rlx.config.schema.roles import has_critic, has_reward_model, model_scores_alone

ESTIMATOR, SAMPLES = "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"
FILTER, METRIC = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric"
AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode"

REWRITTEN = "actor_rollout_ref.rollout.multi_turn.on_rewritten_history"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"

METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")
SEQUENCE_RATIOS = ("gspo", "geo_mean")


def critic_is_used(s: CheckContext) -> Faults:
    """Keys of the critic need an estimator that trains a critic."""
    keys = [key for key in s.changed_keys if key.startswith("critic.")]
    if keys and not has_critic(s.config):
        remedy = f"remove {'it' if len(keys) == 1 else 'them'}, or set {ESTIMATOR}=gae"
        yield s.fault(f"{s.config.algorithm.adv_estimator} has no critic", "no key below critic", remedy, *keys)


def filtered_groups_can_differ(s: CheckContext) -> Faults:
    """Dynamic sampling needs several samples per prompt and a metric that exists before log-probs are computed."""
    filters = s.config.algorithm.filter_groups
    if not filters.enable:
        return
    known = _metrics(s.config)
    if known is not None and filters.metric not in known:
        expected = f"one of {', '.join(known)}, or a number that a reward function of yours reports"
        yield s.fault(f"{METRIC} is not known", expected, f"set {METRIC}=acc", FILTER, METRIC)
    if filters.metric == "seq_final_reward" and s.config.algorithm.use_kl_in_reward:
        expected = "a metric without the KL: prompts are chosen before log-probs are computed"
        remedy = f"set {METRIC}=seq_reward"
        yield s.fault("dynamic sampling does not know the KL", expected, remedy, METRIC, "algorithm.use_kl_in_reward")


def _metrics(config: PPOConfig) -> tuple[str, ...] | None:
    """Return the numbers that can compare samples; None if a user's function may report any number."""
    by_model = has_reward_model(config)
    by_functions = not model_scores_alone(config)
    if by_functions and config.custom_reward_function.path is not None:
        return None
    form = ("format",) if by_functions and config.reward.format is not None else ()
    return (*METRICS, *form, *(("model_score", "rule_score") if by_model and by_functions else ()))


def branches_are_no_samples(s: CheckContext) -> Faults:
    """The rows of a conversation that forks are parts of one sample, so no ratio may be one of a row."""
    if s.value(REWRITTEN) != "fork":
        return
    policy_loss = s.config.actor_rollout_ref.actor.policy_loss
    if policy_loss.loss_mode in SEQUENCE_RATIOS and policy_loss.path is None:
        what = f"{policy_loss.loss_mode} has a ratio for each row, and a conversation that forks has several rows"
        yield s.fault(what, "a ratio of tokens", f"set {LOSS_MODE}=vanilla, or {REWRITTEN}=keep", LOSS_MODE, REWRITTEN)


ALGORITHM_RULES = (critic_is_used, filtered_groups_can_differ, branches_are_no_samples)


def algorithm_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of algorithms that differ from their paper or from a user's likely intent."""
    actor, algorithm, trainer = s.config.actor_rollout_ref.actor, s.config.algorithm, s.config.trainer
    mode = actor.policy_loss.loss_mode
    if mode in SEQUENCE_LOSSES and actor.policy_loss.path is None and actor.loss_agg_mode != "seq-mean-token-mean":
        yield f"{mode} is defined as a mean over sequences: {AGGREGATION}={actor.loss_agg_mode}, not seq-mean-token-mean"
    if algorithm.use_kl_in_reward and algorithm.needs(NORM_BY_STD) and algorithm.norm_adv_by_std_in_grpo:
        yield (
            f"{algorithm.adv_estimator} divides by the standard deviation of rewards with the KL in them: if a prompt's "
            "scores are equal, differences of the KL count as much as right and wrong for other prompts; use "
            "actor.use_kl_loss, or algorithm.norm_adv_by_std_in_grpo=False"
        )
    control = algorithm.kl_ctrl
    if algorithm.use_kl_in_reward and control.type == "adaptive" and control.kl_coef == 0:
        yield "algorithm.kl_ctrl.kl_coef=0 stays 0 with type=adaptive, which multiplies it: set a first coefficient"
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield f"the gradient of kl_loss_type={actor.kl_loss_type} is 0 on average: use {actor.kl_loss_type}+, k2 or k3"
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric == "acc" and model_scores_alone(s.config):
        yield (
            f"{METRIC}=acc tests whether a score is at least 1, which means little for a reward model: let a function score "
            "too with reward_model.rule_weight"
        )
    if algorithm.filter_groups.enable and trainer.total_training_steps is None:
        yield (
            "with algorithm.filter_groups a step may take several batches of prompts, so the run makes more passes over them "
            f"than trainer.total_epochs={trainer.total_epochs}: set trainer.total_training_steps to choose its end"
        )
