import json
import os
import re
from pathlib import Path

import pytest

from rlx.config.schema import ArithmeticConfig
from rlx.data.arithmetic import make_problems
from rlx.data.files import gsm8k_row as to_row
from rlx.rewards.gsm8k import compute_score

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gsm8k_tiny.jsonl"


def score(solution, truth="18", **options):
    return compute_score("openai/gsm8k", solution, truth, **options)


RIGHT = {
    "18": ["18", "18.", "18.0", "$18", "18%", "18 eggs"],
    **{"18.00": ["18"], " $18. ": ["18"], "1200": ["1,200"], "1,200": ["1200"], "12000": ["12,000,"]},
    **{"1200.5": ["$1,200.50"], "0.5": [".5"], ".5": ["0.50"], "-3": ["-3", "-$3", "$-3", "- 3"]},
    **{"-0": ["0"], "7": ["007"], 18: ["18"], 2.5: ["2.5"], "9" * 20: ["9" * 20]},
}


@pytest.mark.parametrize("truth", RIGHT)
def test_right_number(truth):
    for answer in RIGHT[truth]:
        assert score(f"Working it out.\n#### {answer}", truth) == 1.0, answer
        assert score(f"Working it out.\n####{answer}\nDone.", truth) == 1.0, answer


@pytest.mark.parametrize(
    "solution",
    [
        *["", "18", "The answer is 18.", "### 18", "#### eighteen", "####", "####\n18", "#### \\boxed{18}"],
        *["#### 18/3", "#### 18 + 3 = 21", "#### 18-20", "#### 18.5.2", "#### 18 * 2", "#### 18,000/3"],
        "#### 18 " + "x" * 300,
    ],
)
def test_no_answer_gets_nothing(solution):
    assert score(solution, format_score=0.5) == 0.0


@pytest.mark.parametrize("solution", ["#### 19", "#### -18", "#### 180", "#### 1.8", "#### 1,8.1", "#### 18\n#### 19"])
def test_wrong_number_gets_the_format_score(solution):
    assert score(solution) == 0.0
    assert score(solution, format_score=0.1) == 0.1


def test_last_answer_counts():
    assert score("#### 17\nNo.\n#### 18") == 1.0
    assert score("#### 18\n####") == 1.0


def test_huge_numbers_are_not_rounded():
    assert score("#### 99999999999999999998", "99999999999999999999") == 0.0


@pytest.mark.parametrize("truth", ["", "many", None, "1/2", "#### 18"])
def test_ground_truth_that_is_no_number(truth):
    with pytest.raises(ValueError, match=r"ground_truth is .* expected a number"):
        score("#### 18", truth)


def check_rows(rows):
    """The reference solution scores 1.0; with another final number, longer or shorter by one, 0.0."""
    for row in rows:
        solution, truth = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], solution, truth) == 1.0, solution
        body, last = solution.rsplit("####", 1)
        for change in (1, -1):
            wrong = f"{body}#### {int(last.replace(',', '')) + change:,}"
            assert compute_score(row["data_source"], wrong, truth) == 0.0, wrong
        assert compute_score(row["data_source"], re.sub("####", "so", solution), truth) == 0.0


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4])
def test_every_generated_problem(difficulty):
    config = ArithmeticConfig(difficulty=difficulty, train_size=2000)
    check_rows(make_problems(config, "train") + make_problems(config, "val"))


def official_rows(path, split):
    return [to_row(json.loads(line), split, i) for i, line in enumerate(path.read_text(encoding="utf-8").splitlines())]


def test_every_row_of_the_fixture():
    rows = official_rows(FIXTURE, "train")
    assert len(rows) == 6
    check_rows(rows)


@pytest.mark.skipif(
    "RLX_GSM8K_DIR" not in os.environ, reason="RLX_GSM8K_DIR names no folder with GSM8K's train.jsonl and test.jsonl"
)
def test_every_official_row():
    folder = Path(os.environ["RLX_GSM8K_DIR"])
    rows = official_rows(folder / "train.jsonl", "train") + official_rows(folder / "test.jsonl", "test")
    assert len(rows) == 8792
    check_rows(rows)
