import pytest

from rlx.rewards.math import compute_score
from rlx.rewards.rules import FORM_PATTERNS, score_form

RIGHT = {
    "tags": ["<think>a\nb</think>\n<answer>7</answer>", " <think></think><answer>x</answer>\n"],
    "hashes": ["so it is\n#### 18", "#### $1,200.\n", "a #### b\n#### c"],
    "boxed": ["so \\boxed{7}", "\\boxed{\\frac{1}{2}} it is\n", "\\boxed{{1}}"],
    r"\d+": ["123"],
}
WRONG = {
    "tags": [
        *("", "<answer>7</answer>", "<think>a</think>7", "<think>a</think><answer></answer>"),
        *("<think>a</think><answer>7</answer> done", "<think>a<think>b</think><answer>7</answer>"),
    ],
    "hashes": ["", "####", "#### \n", "#### 18\nDone.", "### 18"],
    "boxed": ["", "7", "\\boxed{", "\\boxed{}", "boxed{7}"],
    r"\d+": ["", "12a"],
}


@pytest.mark.parametrize("form", RIGHT)
def test_forms(form):
    assert [score_form("", text, None, form=form) for text in RIGHT[form]] == [1.0] * len(RIGHT[form])
    assert [score_form("", text, None, form=form) for text in WRONG[form]] == [0.0] * len(WRONG[form])


def test_every_named_form_has_a_case():
    assert set(FORM_PATTERNS) <= set(RIGHT)


def grade(solution, truth):
    return compute_score("math", solution, truth)


@pytest.mark.parametrize(
    "solution, truth",
    [
        ("So the answer is \\boxed{42}.", "42"),
        ("Step 1 gives \\boxed{1}\n\nHence \\boxed{42}\nDone.", "42"),
        ("$x$ is \\boxed{1} or \\boxed{2}", "\\{1, 2\\}"),
        ("$x = \\boxed{\\frac{1}{2}}$", "0.5"),
        ("\\boxed{x(x+2)}", "x^2+2x"),
        ("\\boxed{\\text{Friday}}", "\\text{Friday}"),
        ("\\boxed{(1, 2)}", "(1,2)"),
        ("the answer is 1,000", "1000"),
        ("\\boxed{7}", 7),
    ],
)
def test_equal(solution, truth):
    assert grade(solution, truth) == 1.0


WRONG_MATHS = [
    "\\boxed{43}",
    "\\boxed{42} or rather \\boxed{43}",
    "\\boxed{42}\nNo: \\boxed{43}",
    "no idea",
    "",
    "\\boxed{",
]


@pytest.mark.parametrize("solution", WRONG_MATHS)
def test_not_equal(solution):
    assert grade(solution, "42") == 0.0


def test_ground_truth_that_is_no_mathematics():
    with pytest.raises(ValueError, match="ground_truth is '', expected an expression"):
        grade("\\boxed{1}", "")
