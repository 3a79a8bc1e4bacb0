import re

import pytest

from rlx.config.schema import ArithmeticConfig
from rlx.data import arithmetic
from rlx.data.arithmetic import make_problems

DIFFICULTIES = (1, 2, 3, 4)


def question(row):
    return row["prompt"][0]["content"]


def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text)]


@pytest.fixture(scope="module", params=DIFFICULTIES)
def difficulty(request):
    return request.param


@pytest.fixture(scope="module")
def rows(difficulty):
    return make_problems(ArithmeticConfig(difficulty=difficulty, train_size=3000), "train")


def test_working_is_right_and_uses_the_numbers_of_the_question(rows, difficulty):
    lengths = set()
    for row in rows:
        *steps, last = row["extra_info"]["answer"].split("\n")
        given, total = numbers(question(row)), None
        for step in steps:
            left, sign, right, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", step).groups()
            left, right, result = int(left), int(right), int(result)
            assert left == (given.pop(0) if total is None else total)
            assert right == given.pop(0)
            assert result == {"+": left + right, "-": left - right, "*": left * right}[sign] > 0
            total = result
        assert not given
        assert last == f"#### {total}" and row["reward_model"]["ground_truth"] == str(total)
        assert max([*numbers(question(row)), total]) <= arithmetic.LARGEST[difficulty]
        lengths.add(len(steps))
    assert lengths == {1: {1}, 2: {2}, 3: {2, 3}, 4: {1}}[difficulty]


def test_losses_and_gains_read_as_what_they_do():
    rows = make_problems(ArithmeticConfig(train_size=3000), "train")
    for row in rows:
        text, step = question(row), row["extra_info"]["answer"]
        if re.search(r"buys|finds|together|wins|gives h", text):
            assert "+" in step, text
        if re.search(r"loses|sells|away|fewer|needs|takes| left", text):
            assert "-" in step, text
    assert {("+" in row["extra_info"]["answer"]) for row in rows} == {True, False}


def test_distinct_and_held_out_whatever_sizes_and_seeds(difficulty, rows):
    train = {question(row) for row in rows}
    assert len(train) == 3000
    val = {question(row) for row in make_problems(ArithmeticConfig(difficulty=difficulty, val_size=700), "val")}
    assert len(val) == 700
    assert not train & val
    other = make_problems(ArithmeticConfig(difficulty=difficulty, train_size=3000, seed=9), "train")
    assert not {question(row) for row in other} & val
    assert {question(row) for row in other} != train


def test_deterministic_and_a_larger_set_begins_with_the_smaller(difficulty, rows):
    assert make_problems(ArithmeticConfig(difficulty=difficulty, train_size=500), "train") == rows[:500]


def test_more_than_there_are(monkeypatch):
    for words in ("BOYS", "GIRLS"):
        monkeypatch.setattr(arithmetic, words, getattr(arithmetic, words)[:1])
    monkeypatch.setattr(arithmetic, "THINGS", ("pens",))
    monkeypatch.setattr(arithmetic, "LARGEST", {1: 5})
    with pytest.raises(ValueError, match=r"distinct val problems of difficulty 1, expected val_size=5000"):
        make_problems(ArithmeticConfig(val_size=5000), "val")
