import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlx.rewards.math import compute_score

ENDLESS = "\\boxed{9^{9^{9^{9}}} + 10^{10^{10}}!}"


def score(solution, truth, **options):
    return compute_score("math", solution, truth, **options)


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
    assert score(solution, truth) == {"score": 1.0, "math_timeout": 0.0}


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
    assert score(solution, truth) == {"score": 0.0, "math_timeout": 0.0}


def test_ground_truth_that_is_no_mathematics():
    with pytest.raises(ValueError, match="ground_truth is '', expected an expression"):
        score("\\boxed{1}", "")


def test_a_grading_without_end_is_ended_and_the_next_one_works():
    assert score(ENDLESS, "\\int_0^1 9^{9^{9^{9}}} dx", limit_s=0.5) == {"score": 0.0, "math_timeout": 1.0}
    assert score("\\boxed{2}", "2")["score"] == 1.0


def test_threads_in_parallel_get_their_own_answers():
    truths = [str(i) for i in range(40)]
    with ThreadPoolExecutor(4) as threads:
        right = list(threads.map(lambda t: score(f"\\boxed{{{t}}}", t)["score"], truths))
        wrong = list(threads.map(lambda t: score(f"\\boxed{{{t}1}}", t)["score"], truths))
    assert right == [1.0] * 40 and wrong == [0.0] * 40


def test_no_process_outlives_its_parent():
    # The grading process holds the parent's stderr, so this returns only once both have ended.
    code = "import rlx.rewards.math as m; print(m.compute_score('math', '1', '1')['score'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1.0\n", "")
