import math

import numpy as np
import pytest
import torch

from rlx.processes.calls import is_async
from rlx.rewards.function import Function, outcome_of, raised
from rlx.user_code import UserCodeError


def load(path, name="compute_score", **options):
    return Function(path, name, 1.0, **options).load()


@pytest.mark.parametrize(
    "parameters",
    ["data_source, solution_str, ground_truth, extra_info=None", "solution_str, ground_truth, **rest", "**all"],
)
def test_signatures_that_fit(write_module, parameters):
    function = load(write_module(f"def compute_score({parameters}): return 0.25"))
    assert function(data_source="d", solution_str="s", ground_truth="g", extra_info={}) == 0.25


LISTS = "data_sources, solution_strs, ground_truths, extra_infos"


def test_signatures_of_lists_and_of_further_arguments(write_module):
    path = write_module(f"def compute_score({LISTS}, weight): return [weight]")
    assert load(path, batched=True, options={"weight": 2})([], [], [], [], 2) == [2]
    with pytest.raises(UserCodeError, match="missing a required argument: 'weight'"):
        load(path, batched=True)
    with pytest.raises(UserCodeError, match="reward_kwargs: got ground_truths, which each sample has"):
        load(path, batched=True, options={"weight": 2, "ground_truths": ["7"]})


@pytest.mark.parametrize(
    "text, what",
    [
        ("def compute_score(answer): return 1", r"compute_score\(answer\) in .* cannot take the arguments data_source"),
        ("def compute_score(data_source, solution_str, ground_truth): ...", "unexpected keyword argument 'extra_info'"),
        (f"def compute_score({LISTS}): return 1", "set reward.reward_manager.name=batch"),
        ("compute_score = 5", "'compute_score' in .* is 5, expected a function"),
        ("def score(**all): ...", r"has no 'compute_score', it has \['score'\]; correct custom_reward_function.name"),
    ],
)
def test_functions_that_do_not_fit(write_module, text, what):
    with pytest.raises(UserCodeError, match=what):
        load(write_module(text))


def test_async_functions_and_objects_are_known(write_module):
    path = write_module(
        "class Judge:\n    async def __call__(self, **all): ...\njudge = Judge()\ndef plain(**all): ..."
    )
    assert is_async(load(path, "judge")) and not is_async(load(path, "plain"))


ONE, MANY = Function("f.py", "f", 1.0), Function("f.py", "f", 1.0, batched=True)


@pytest.mark.parametrize(
    "value", [True, 1, np.float32(1), np.int64(1), np.bool_(True), np.array([1]), torch.tensor(1.0), torch.tensor([1])]
)
def test_kinds_of_numbers(value):
    assert outcome_of(ONE, value, 1).answers == [{"score": 1.0}]
    report = {"score": value, "acc": value, "pred": "text", "steps": [1, 2], "two": np.zeros(2)}
    assert outcome_of(ONE, report, 1).answers == [{"score": 1.0, "acc": 1.0}]


@pytest.mark.parametrize(
    "value", [None, "1.0", math.nan, math.inf, -1e39, {"acc": 1.0}, {"score": math.nan}, [1.0], object()]
)
def test_reports_without_a_number(value):
    (answer,) = outcome_of(ONE, value, 1).answers
    assert answer.startswith("returned ") and "expected a finite number or a dict whose `score` is one" in answer


def test_a_huge_report_is_cut_short():
    outcome = raised(ValueError("x" * 10**6))
    assert len(outcome.fault) + len(outcome.traceback) < 30_000 and outcome.fault.startswith("raised ValueError: x")
    assert len(outcome_of(ONE, "x" * 10**6, 1).answers[0]) < 400


@pytest.mark.parametrize(
    "result", [[1, 2.5], (1, 2.5), np.array([1, 2.5]), torch.tensor([1, 2.5]), [{"score": 1}, 2.5]]
)
def test_reports_of_a_list_of_samples(result):
    assert outcome_of(MANY, result, 2).answers == [{"score": 1.0}, {"score": 2.5}]


@pytest.mark.parametrize("result", [[1.0], 1.0, "ab", {"score": [1.0, 2.0]}, None])
def test_a_list_of_another_length_is_a_fault_of_the_call(result):
    assert outcome_of(MANY, result, 2).kind == "error"
    assert "expected a list of 2 numbers or dicts" in outcome_of(MANY, result, 2).fault


def test_one_bad_report_of_a_list_is_its_samples_fault():
    good, bad = outcome_of(MANY, [1.0, None], 2).answers
    assert good == {"score": 1.0} and "returned None" in bad
