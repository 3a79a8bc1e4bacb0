"""The calculator computes what it should, and runs no code; the guessing game answers as it says."""

import pytest

from rlx.environments.built_in_tools import calc
from rlx.environments.guessing import Guessing
from rlx.environments.protocol import Turn

VALUES = {
    **{"4821+3977": "8798", "3 + 4*2": "11", "(3+4)*2": "14", "-7//2": "-4", "7%4": "3", "2**10": "1024"},
    **{"8/2": "4", "1/3": "0.3333333333333333", "1.5+1.5": "3", " +3\n": "3", "2**-1": "0.5", "0**0": "1"},
    **{"9" * 150: "9" * 150, "1e20": "1e+20"},
}
OTHERS = [
    *("9**9**9", "2**99999999", "10**400*1.0", "1e400", "1/0", "7%0", "(-8)**0.5", "1<<99", "True", "'a'*9"),
    *("[1]", "x", "__import__('os')", "print(1)", "a.b", "3+"),
    *("(lambda: 1)()", "", "\x00", "\ud800", "(" * 150, "1+" * 90 + "1" * 50, "1" * 5000, "f'{1}'", "1 if 1 else 2"),
    *("1;2", "0x" + "f" * 190 + "**99", "-" * 190 + "1" * 30, "1j", "...", "None"),
]


@pytest.mark.parametrize("expression", VALUES)
def test_values(expression):
    assert calc(expression) == VALUES[expression]


@pytest.mark.parametrize("expression", OTHERS)
def test_nothing_else_is_computed(expression):
    with pytest.raises((ValueError, ArithmeticError)):
        calc(expression)


def play(secret, *guesses, **kwargs):
    game = Guessing(**kwargs)
    begin = game.reset({"ground_truth": str(secret)})
    return begin, [game.step(Turn(guess, place)) for place, guess in enumerate(guesses)]


def hints(answers):
    return [message["content"] for answer in answers for message in answer.messages]


def test_a_game():
    begin, answers = play(20, "32", "I say 16", "20")
    assert begin == [{"role": "user", "content": "1-63"}] and hints(answers) == ["lower", "higher"]
    assert [answer.done for answer in answers] == [False, False, True]
    assert [answer.reward for answer in answers] == [None, None, 1.0] and answers[-1].info == {
        "guesses": 3,
        "acc": 1.0,
    }


def test_it_ends_after_the_last_guess():
    _, answers = play(1, "no", "9" * 50, turns=2)
    assert hints(answers) == ["1-63!"] and answers[-1].done and answers[-1].reward == 0.0


@pytest.mark.parametrize("secret", [1, 63, 64, 999, 0, -5])
def test_halving_always_wins(secret):
    game, low, high = Guessing(), 1, 63
    game.reset({"ground_truth": str(secret)})
    for place in range(6):
        guess = (low + high) // 2
        answer = game.step(Turn(str(guess), place))
        if answer.done:
            break
        low, high = (guess + 1, high) if answer.messages[0]["content"] == "higher" else (low, guess - 1)
    assert answer.reward == 1.0
