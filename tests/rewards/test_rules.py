import pytest

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
