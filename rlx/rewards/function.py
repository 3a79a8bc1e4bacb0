"""A reward function of the user's own."""

import inspect
from collections.abc import Callable
from typing import Any

from rlx.config.schema import CustomRewardConfig
from rlx.user_code import UserCodeError, load_name

RewardFunction = Callable[..., Any]
"""f(data_source, solution_str, ground_truth, extra_info=None), called by keyword -> a number, or a dict with `score`."""

KEY = "custom_reward_function"


def load_function(config: CustomRewardConfig) -> RewardFunction:
    """The function `config.name` in the file `config.path`.

    Raises:
        UserCodeError: the file is missing or fails to import, has no such name, or it cannot be called as a reward.
    """
    assert config.path is not None, "only called when a path is set"
    function: RewardFunction = load_name(config.path, config.name, KEY)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UserCodeError(
            f"{KEY}.name: {config.name!r} in {config.path} is {function!r}, expected a plain function "
            "f(data_source, solution_str, ground_truth, extra_info=None)"
        )
    try:
        inspect.signature(function).bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except TypeError as fault:
        raise UserCodeError(
            f"{KEY}: {config.name}{inspect.signature(function)} in {config.path} cannot take the arguments "
            f"data_source, solution_str, ground_truth, extra_info ({fault}); rename its parameters or add **kwargs"
        ) from fault
    return function
