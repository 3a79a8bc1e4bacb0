import json
import math
import pickle

import pytest
import torch

from rlx.config.schema import CustomRewardConfig, RewardConfig
from rlx.rewards.manager import RewardError, RewardManager


def manager(path=None, name="compute_score", format_score=0.0):
    return RewardManager(RewardConfig(format_score=format_score), CustomRewardConfig(path=path, name=name))


def test_each_sample_goes_to_the_function_of_its_source(make_batch, tmp_path):
    batch = make_batch(
        ["#### 7", "#### 8", "so \\boxed{\\frac12}", "#### 7", "\\boxed{3}"],
        ["7", "7", "0.5", "7", "4"],
        ["openai/gsm8k", "rlx/arithmetic", "HuggingFaceH4/MATH-500", "rlx/arithmetic", "math_dapo"],
    )
    scores = manager(format_score=0.1).score(batch, tmp_path)
    assert scores.scores.dtype == torch.float32
    assert torch.equal(scores.scores, torch.tensor([1.0, 0.1, 1.0, 1.0, 0.0]))
    timeouts = scores.extra["math_timeout"]
    assert [timeouts[2], timeouts[4]] == [0.0, 0.0]
    assert [math.isnan(timeouts[i]) for i in (0, 1, 3)] == [True] * 3
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_and_torch_are_numbers(make_batch, write_module, tmp_path):
    path = write_module(
        "import numpy as np, torch\n"
        "def compute_score(solution_str, **rest):\n"
        "    right = np.bool_(solution_str == 'b')\n"
        "    if solution_str == 'c': return right\n"
        "    return {'score': np.float32(right), 'acc': right, 'len': np.array(3), 'p': torch.tensor([0.5])}\n"
    )
    scores = manager(path).score(make_batch(["a", "b", "c"], [0, 0, 0]), tmp_path)
    assert scores.scores.tolist() == [0.0, 1.0, 0.0]
    assert scores.extra["acc"][:2] == [0.0, 1.0]
    assert scores.extra["len"][:2] == [3.0, 3.0] and scores.extra["p"][:2] == [0.5, 0.5]


def test_unknown_source_lists_the_known_ones(make_batch, tmp_path):
    with pytest.raises(RewardError) as caught:
        manager().score(make_batch(["a", "b"], ["1", "2"], ["openai/gsm8k", "my/data"]), tmp_path)
    for part in ("'my/data'", "openai/gsm8k", "rlx/arithmetic", "lighteval/MATH", "custom_reward_function.path"):
        assert part in str(caught.value)


def test_custom_function_scores_every_source(make_batch, write_module, tmp_path):
    path = write_module(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(data_source) + len(solution_str) + ground_truth + extra_info['index']\n"
    )
    batch = make_batch(["abc", ""], [0.5, -1], ["my/data", "openai/gsm8k"])
    assert manager(path).score(batch, tmp_path).scores.tolist() == [7 + 3 + 0.5 + 100, 12 + 0 - 1 + 101]


def test_other_numbers_of_a_report_are_collected(make_batch, write_module, tmp_path):
    path = write_module(
        "def compute_score(solution_str, **rest):\n"
        "    report = {'score': 1, 'acc': solution_str == 'b', 'pred': solution_str}\n"
        "    return report | ({'length': 3.5} if solution_str == 'b' else {})\n"
    )
    scores = manager(path).score(make_batch(["a", "b"], [0, 0]), tmp_path)
    assert scores.scores.tolist() == [1.0, 1.0]
    assert set(scores.extra) == {"acc", "length"}
    assert scores.extra["acc"] == [0.0, 1.0]
    assert math.isnan(scores.extra["length"][0]) and scores.extra["length"][1] == 3.5


@pytest.mark.parametrize(
    "value", ["True", "1", "np.float32(1)", "np.int64(1)", "torch.tensor(1.0)", "torch.tensor([1])"]
)
def test_kinds_of_numbers(make_batch, write_module, tmp_path, value):
    path = write_module(f"import numpy as np, torch\ndef compute_score(**sample):\n    return {value}\n")
    assert manager(path).score(make_batch(["a"], [0]), tmp_path).scores.tolist() == [1.0]


@pytest.mark.parametrize(
    "body, what",
    [
        ("raise KeyError('answer')", "raised KeyError: 'answer'"),
        ("return float('nan')", "returned nan, expected a finite number"),
        ("return float('inf')", "returned inf, expected"),
        ("return None", "returned None, expected"),
        ("return '1.0'", "returned '1.0', expected"),
        ("return {'acc': 1.0}", "returned {'acc': 1.0}, expected a finite number or a dict whose `score` is one"),
        ("return {'score': float('nan')}", "returned {'score': nan}"),
    ],
)
def test_fault_names_the_sample_and_keeps_a_copy(make_batch, write_module, tmp_path, body, what):
    path = write_module(f"def rate(solution_str, **rest):\n    if solution_str == 'ok': return 1.0\n    {body}\n")
    batch = make_batch(
        ["ok", "bäd\ud800"], ["1", {"deep": {2}}], "my/data", [{"index": 0}, {"index": 41, "split": "train"}]
    )
    with pytest.raises(RewardError) as caught:
        manager(path, "rate").score(batch, tmp_path / "new" / "folder")
    message = str(caught.value)
    copy = tmp_path / "new" / "folder" / "reward_error_my-data_41.json"
    for part in (f"rate in {path} {what}", "data source 'my/data'", "sample 41", str(copy)):
        assert part in message
    kept = json.loads(copy.read_text(encoding="utf-8"))
    assert kept["solution_str"] == "bäd\ud800" and kept["extra_info"] == {"index": 41, "split": "train"}
    assert kept["ground_truth"] == {"deep": "{2}"} and kept["data_source"] == "my/data"
    assert what[:8] in kept["fault"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize("source, truth", [("openai/gsm8k", "many"), ("math", "")])
def test_bad_ground_truth_is_a_fault_of_the_sample(make_batch, tmp_path, source, truth):
    with pytest.raises(
        RewardError, match=rf"rlx's reward function of '{source}' raised ValueError: ground_truth is '{truth}'"
    ):
        manager().score(make_batch(["#### 1"], [truth], source, [{}]), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
