"""Demonstrations are conversations that the environments would have, and end right."""

import asyncio

import pytest

from rlx.config.schema import ArithmeticConfig, EnvironmentConfig
from rlx.data.arithmetic import make_problems
from rlx.environments.built_in_tools import Calculator
from rlx.environments.guessing import Guessing
from rlx.environments.protocol import Turn
from rlx.trainer.demonstrations import CALLS, demonstration

ROWS = make_problems(ArithmeticConfig(difficulty=3, train_size=300), "train")


def answers(messages):
    return [message for message in messages if message["role"] == "assistant"]


def test_without_an_environment_the_solution_is_one_turn():
    row = ROWS[0]
    solution = {"role": "assistant", "content": row["extra_info"]["answer"]}
    assert demonstration(row, EnvironmentConfig()) == [*row["prompt"], solution]
    assert demonstration(row, EnvironmentConfig(name="python")) == [*row["prompt"], solution]


def test_some_problems_are_solved_with_the_calculator():
    conversations = [(row, demonstration(row, EnvironmentConfig(name="calculator"))) for row in ROWS]
    called = [(row, messages) for row, messages in conversations if len(answers(messages)) > 1]
    assert 0.5 * len(ROWS) / CALLS < len(called) < 1.5 * len(ROWS) / CALLS
    for row, messages in called:
        calculator = Calculator("tags")
        for message, after in zip(messages[len(row["prompt"]) :], messages[len(row["prompt"]) + 1 :], strict=False):
            if message["role"] == "assistant":
                [found] = asyncio.run(calculator.step(Turn(message["content"], 0))).messages
                assert found["content"] == after["content"] and after["role"] == "tool"
        assert messages[-1]["content"] == f"#### {row['reward_model']['ground_truth']}"


@pytest.mark.parametrize("kwargs", [{}, {"largest": 15, "turns": 3}])
def test_guesses_are_among_the_numbers_that_are_left(kwargs):
    wins = 0
    for row in ROWS:
        messages, game = demonstration(row, EnvironmentConfig(name="guessing", kwargs=kwargs)), Guessing(**kwargs)
        assert game.reset({"ground_truth": row["reward_model"]["ground_truth"]}) == messages[:1]
        for turn in answers(messages):
            answer = game.step(Turn(turn["content"], 0))
            assert turn["content"] in turn["accepted"]
        assert answer.done
        wins += answer.reward
    assert 0.2 * len(ROWS) < wins < 0.9 * len(ROWS), "reinforcement learning has something to add"
