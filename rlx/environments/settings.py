"""Name the configured environment. It imports little, because it runs before torch is loaded."""

from rlx.config.schema import PPOConfig
from rlx.environments.spec import EnvironmentSpec

OWN_NAME = "Environment"
"""The class in `environment.path` if `environment.name` names none."""


def environment_spec(config: PPOConfig) -> EnvironmentSpec:
    """Return the environment that the configuration names."""
    own, turns = config.environment, config.actor_rollout_ref.rollout.multi_turn
    return EnvironmentSpec(own.name or OWN_NAME, own.path, own.kwargs, own.timeout_s, turns.format)
