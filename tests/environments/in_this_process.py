"""A sampler and a pool in this process, for tests of conversations alone."""

from collections import deque

from rlx.environments.protocol import Failure, Observation, Reset
from rlx.rollout.protocol import Completion


class Sampler:
    """Says what `say(request)` returns, (text, whether it stops); keeps the requests that it got."""

    def __init__(self, tokenizer, say):
        self._tokenizer, self._say = tokenizer, say
        self.requests, self._open, self.version = [], {}, 1

    @property
    def running(self):
        return len(self._open)

    def add_request(self, request):
        self._open[len(self.requests)] = request
        self.requests.append(request)
        return len(self.requests) - 1

    def step(self):
        """Completes the oldest request."""
        number = next(iter(self._open))
        request = self._open.pop(number)
        text, stops = self._say(request)
        ids = self._tokenizer.encode(text, add_special_tokens=False)[: request.sampling.max_tokens]
        if stops and len(ids) < request.sampling.max_tokens:
            ids.append(self._tokenizer.eos_token_id)
        ended = ids[-1] == self._tokenizer.eos_token_id
        return [(number, Completion(ids, [-0.5] * len(ids), "stop" if ended else "length"))]

    def abort(self, numbers=None):
        for number in list(self._open) if numbers is None else numbers:
            del self._open[number]


class Pool:
    """Environments in this process that answer at the next poll."""

    def __init__(self, make, tools=()):
        self._make, self._tools, self._answers = make, list(tools), deque()
        self.open = {}

    def reset(self, key, row):
        self.open[key] = self._make()
        self._answer(key, lambda: Reset(self.open[key].reset(row), self._tools))

    def step(self, key, turn):
        self._answer(key, lambda: self.open[key].step(turn))

    def _answer(self, key, call):
        try:
            self._answers.append((key, call()))
        except Exception as fault:
            self._answers.append((key, Failure(str(fault), "error")))

    def flush(self):
        pass

    def poll(self, timeout_s):
        answers, self._answers = list(self._answers), deque()
        return [answer for answer in answers if answer[0] in self.open]

    def end(self, key):
        self.open.pop(key, None)


class Echo:
    """Repeats each turn's text and ends after `turns` of them."""

    def __init__(self, turns=2, role="user"):
        self._turns, self._role = turns, role

    def reset(self, row):
        return row["prompt"]

    def step(self, turn):
        done = turn.index == self._turns - 1
        return Observation([{"role": self._role, "content": turn.text}], reward=float(turn.index), done=done)
