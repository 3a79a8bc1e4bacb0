import pytest

from rlx.config.schema import CustomRewardConfig
from rlx.rewards.function import load_function
from rlx.user_code import UserCodeError


def load(path, name="compute_score"):
    return load_function(CustomRewardConfig(path=path, name=name))


@pytest.mark.parametrize(
    "parameters",
    ["data_source, solution_str, ground_truth, extra_info=None", "solution_str, ground_truth, **rest", "**all"],
)
def test_signatures_that_fit(write_module, parameters):
    function = load(write_module(f"def compute_score({parameters}): return 0.25"))
    assert function(data_source="d", solution_str="s", ground_truth="g", extra_info={}) == 0.25


@pytest.mark.parametrize(
    "text, what",
    [
        ("def compute_score(answer): return 1", r"compute_score\(answer\) in .* cannot take the arguments data_source"),
        (
            "def compute_score(data_source, solution_str, ground_truth): return 1",
            "got an unexpected keyword argument 'extra_info'",
        ),
        ("compute_score = 5", "'compute_score' in .* is 5, expected a plain function"),
        ("async def compute_score(**all): return 1", "expected a plain function"),
        (
            "def score(**all): return 1",
            r"has no 'compute_score', it has \['score'\]; correct custom_reward_function.name",
        ),
    ],
)
def test_functions_that_do_not_fit(write_module, text, what):
    with pytest.raises(UserCodeError, match=what):
        load(write_module(text))
