import pytest

from rlx.rewards.math import compute_score


def score(solution, truth):
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
    assert score(solution, truth) == 1.0


@pytest.mark.parametrize(
    "solution, truth",
    [
        ("\\boxed{43}", "42"),
        ("\\boxed{42} or rather \\boxed{43}", "42"),
        ("\\boxed{42}\nNo: \\boxed{43}", "42"),
        ("no idea", "42"),
        ("", "42"),
        ("\\boxed{", "42"),
    ],
)
def test_not_equal(solution, truth):
    assert score(solution, truth) == 0.0


def test_ground_truth_that_is_no_mathematics():
    with pytest.raises(ValueError, match="ground_truth is '', expected an expression"):
        score("\\boxed{1}", "")
