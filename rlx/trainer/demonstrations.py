"""Conversations that the warm start imitates, so that reinforcement learning has some right turns to reinforce."""

import random
from typing import Any

from rlx.config.schema import EnvironmentConfig
from rlx.data.seeding import seed_for
from rlx.environments.guessing import Guessing
from rlx.environments.protocol import Turn

Message = dict[str, Any]

CALLS = 3
"""With a calculator one problem in this many is demonstrated with calls, the others by working in the head. So the model knows the
form of a call, and reinforcement learning has to find out that calls pay."""


def demonstrated(environment: EnvironmentConfig) -> str | None:
    """Return the environment whose turns are demonstrated, one of rlx's own; None: single answers are."""
    is_own = environment.path is not None
    return environment.name if not is_own and environment.name in ("calculator", "guessing") else None


def demonstration(row: dict[str, Any], environment: EnvironmentConfig) -> list[Message]:
    """Return the conversation of a row of `builtin:arithmetic`; of several turns with the environments calculator and guessing.

    A message of the assistant may have `accepted`: all texts that are as good as its own.
    """
    name = demonstrated(environment)
    if name == "guessing":
        return _guesses(row, Guessing(**environment.kwargs))
    question, solution = row["prompt"], row["extra_info"]["answer"]
    is_called = seed_for("demonstration", question[-1]["content"]) % CALLS == 0
    if name != "calculator" or not is_called:
        return [*question, {"role": "assistant", "content": solution}]
    messages = list(question)
    *steps, answer = solution.split("\n")
    for step in steps:
        expression, result = step.split("=")
        messages.append({"role": "assistant", "content": f"<calc>{expression}</calc>"})
        messages.append({"role": "tool", "content": result})
    return [*messages, {"role": "assistant", "content": answer}]


def _guesses(row: dict[str, Any], game: Guessing) -> list[Message]:
    """Return a game of a player who guesses at random among the numbers that are left."""
    rng = random.Random(seed_for("guesses", row["prompt"][-1]["content"]))
    messages = game.reset({"ground_truth": row["reward_model"]["ground_truth"]})
    low, high, done = 1, int(messages[0]["content"].split("-")[1]), False
    while not done:
        guess = rng.randint(low, high)
        accepted = tuple(map(str, range(low, high + 1)))
        messages.append({"role": "assistant", "content": str(guess), "accepted": accepted})
        answer = game.step(Turn(str(guess), 0))
        messages += answer.messages
        done = answer.done
        if not done:
            low, high = (guess + 1, high) if answer.messages[0]["content"] == "higher" else (low, guess - 1)
    return messages
