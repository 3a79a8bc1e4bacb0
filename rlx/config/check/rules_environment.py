"""Rules about conversations with environments. Each yields the faults it finds."""

from rlx.config.check.context import CheckContext, Faults
from rlx.config.schema.roles import has_environment, has_reward_model, only_environment_scores

NAME, PATH, REWARDS = "environment.name", "environment.path", "environment.rewards"
REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def experts_are_not_replayed(s: CheckContext) -> Faults:
    """Experts are recorded for single turns only."""
    if has_environment(s.config) and s.value(REPLAY):
        what = "the experts of conversations with an environment are not recorded"
        yield s.fault(what, f"{REPLAY}=False", f"set {REPLAY}=False, or remove {NAME} and {PATH}", REPLAY, NAME, PATH)


def one_of_them_scores(s: CheckContext) -> Faults:
    """A reward model is not loaded for nothing."""
    if only_environment_scores(s.config) and has_reward_model(s.config):
        what = "the environment's rewards replace those of the reward model"
        remedy = f"set {REWARDS}=add, or reward_model.enable=False"
        yield s.fault(what, f"{REWARDS}=add with a reward model", remedy, REWARDS, "reward_model.enable")


ENVIRONMENT_RULES = (experts_are_not_replayed, one_of_them_scores)
