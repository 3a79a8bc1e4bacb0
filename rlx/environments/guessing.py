"""A game: guess a number in a few turns; each answer says whether the number is higher or lower."""

import re
from typing import Any

from rlx.environments.protocol import Message, Observation, Turn


class Guessing:
    """Guess a whole number from 1 to `largest` in at most `turns` turns.

    The number comes from a row's `ground_truth`, any whole number, modulo `largest`. So all samples of a group guess the same one. The
    reward comes at the end: 1 for the number, else 0. A turn without a number counts as a wrong guess.
    """

    def __init__(self, largest: int = 63, turns: int = 6):
        self._largest, self._turns = largest, turns
        self._secret = self._made = 0

    def reset(self, row: dict[str, Any]) -> list[Message]:
        self._secret = (int(row["ground_truth"]) - 1) % self._largest + 1
        return [{"role": "user", "content": f"1-{self._largest}"}]

    def step(self, turn: Turn) -> Observation:
        self._made += 1
        found = re.search(r"-?\d{1,18}", turn.text)
        guess = None if found is None else int(found[0])
        right, last = guess == self._secret, self._made == self._turns
        info = {"guesses": self._made, "acc": float(right)}
        if right or last:
            return Observation([], float(right), done=True, info=info)
        hint = f"1-{self._largest}!" if guess is None else "higher" if guess < self._secret else "lower"
        return Observation([{"role": "user", "content": hint}], info=info)
