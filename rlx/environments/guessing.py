"""A game: guess a number in a few turns; each answer says whether the number is higher or lower."""

import re
from typing import Any

from rlx.environments.protocol import Message, Observation, Turn


class Guessing:
    """Guess a whole number from 1 to `largest` in at most `turns` turns.

    The number is a row's `ground_truth`, so that all samples of a group guess the same one. The reward comes at the end: 1 for the
    first guess, and `per_turn` less for each further one; 0 if all are wrong. A turn without a number counts as a wrong guess.

    Args:
        largest: largest number.
        turns: number of guesses.
        per_turn: loss of reward for each further guess.
    """

    def __init__(self, largest: int = 63, turns: int = 6, per_turn: float = 0.0):
        self._largest, self._turns, self._per_turn = largest, turns, per_turn
        self._secret = self._made = 0

    def reset(self, row: dict[str, Any]) -> list[Message]:
        """See Environment."""
        self._secret = int(row["ground_truth"])
        return row["prompt"]  # type: ignore[no-any-return]

    def step(self, turn: Turn) -> Observation:
        """See Environment."""
        self._made += 1
        found = re.search(r"-?\d{1,18}", turn.text)
        guess = None if found is None else int(found[0])
        right, last = guess == self._secret, self._made == self._turns
        info = {"guesses": self._made, "right": float(right)}
        if right or last:
            reward = max(0.0, 1.0 - self._per_turn * (self._made - 1)) if right else 0.0
            return Observation([], reward, done=True, info=info)
        hint = f"a number from 1 to {self._largest}" if guess is None else "higher" if guess < self._secret else "lower"
        return Observation([{"role": "user", "content": hint}], info=info)
