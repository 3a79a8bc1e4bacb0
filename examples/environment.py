"""An environment of your own: a teacher who lets the model try again, and pays less for a later answer.

rlx train experiment=arithmetic environment.path=examples/environment.py environment.name=Teacher environment.kwargs.tries=3 environment.rewards=replace data.max_response_length=160
"""

import re

from rlx.environments.protocol import Observation


class Teacher:
    """One conversation: rlx makes an object for each, in a process of its own."""

    def __init__(self, tries: int = 2):
        self.tries = tries

    def reset(self, row):
        """Return the first messages; `row` has prompt, data_source, ground_truth, extra_info and seed."""
        self.truth = str(row["ground_truth"])
        return row["prompt"]

    def step(self, turn):
        """Answer a turn of the model."""
        found = re.findall(r"####\s*(-?\d+)", turn.text)
        right = bool(found) and found[-1] == self.truth
        last = right or turn.index + 1 == self.tries
        reward = 1.0 / (turn.index + 1) if right else 0.0
        hint = {"role": "user", "content": "Wrong, try again." if found else "Write #### and the number."}
        return Observation([] if last else [hint], reward, done=last, info={"acc": float(right)})
