"""The guessing game answers as it says."""

import pytest

from rlx.environments.guessing import Guessing
from rlx.environments.protocol import Turn


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
