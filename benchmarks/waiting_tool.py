"""Environment and agent of `benchmarks.turns`: a tool that answers after a random time. Environment processes load this file."""

import asyncio
import random
from typing import Any

from rlx.environments.protocol import Message, Observation, Turn


class Waiting:
    """Answers each turn with a few words, after up to `longest_s` seconds, and ends after `turns` turns."""

    def __init__(self, turns: int, longest_s: float) -> None:
        self._turns, self._longest_s = turns, longest_s
        self._draw = random.Random()

    def reset(self, row: dict[str, Any]) -> list[Message]:
        """Begin with the row's prompt."""
        self._draw.seed(row["seed"])
        messages: list[Message] = row["prompt"]
        return messages

    async def step(self, turn: Turn) -> Observation:
        """Answer a turn."""
        if self._longest_s:
            await asyncio.sleep(self._draw.uniform(0.0, self._longest_s))
        is_last = turn.index + 1 == self._turns
        return Observation([] if is_last else [{"role": "tool", "content": "w4 w5 w6 w7"}], done=is_last)


async def run(row: dict[str, Any], client: Any, turns: int, longest_s: float) -> None:
    """Play the same conversation as an agent."""
    environment = Waiting(turns, longest_s)
    messages, answer = environment.reset(row), Observation([])
    for index in range(turns):
        said = await client.chat.completions.create(model="policy", messages=messages)
        message = said.choices[0].message
        answer = await environment.step(Turn(message.content, index))
        messages = [*messages, message.model_dump(), *answer.messages]
