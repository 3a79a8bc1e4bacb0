"""Environments in processes, so that none can stop or hang the sampler beside them.

Note [whose fault it is]: a call that takes too long in Python is interrupted and fails its own conversation alone. If code in C hangs,
crashes or ends the process, all its environments are lost. The process notes whose code is running, so that conversation fails. The
others restart in another process: rlx repeats their reset and turns, and the answers must be the same, apart from `info`. After
`MOST_LOSSES` restarts a conversation fails with its next process. If no code was running, as when a thread crashes, any of them may be at
fault, so each fails with its second process.

Note [one answer each]: every `reset` and `step` gets exactly one answer from `poll`, unless `end` comes first.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.environments.answers import Answer, as_json, decode
from rlx.environments.protocol import Failure, Observation, Turn
from rlx.environments.spec import EnvironmentSpec
from rlx.processes.pool import IsolatedProcess, Loaded, Lost, WorkerPool

SLACK_S = 5.0
"""See WorkerPool. A call that takes too long in Python ends in its process, so this is for code in C alone."""
FAREWELL_S = 2.0
"""Environments have this long to close with the pool [s]."""
MOST_LOSSES = 8
"""Restarts of a conversation that others cause. Each repeats its turns so far."""


@dataclass(eq=False)
class PooledConversation:
    """The requests and answers of a conversation, so that it can restart."""

    number: int  # unique, because keys are reused
    key: int  # of the pool's user
    lines: list[str] = field(default_factory=list)  # requests: the reset and steps
    answers: list[str] = field(default_factory=list)  # digests of those to them
    home: IsolatedProcess | None = None  # of its environment; None if it restarts with its next step, or has failed
    taken: int = 0  # answers of the current environment; fewer than `answers` while it catches up
    losses: int = 0  # processes that others ended
    is_suspect: bool = False  # whether it lost one in which no code was running
    failure: Failure | None = None  # answer to its next step
    has_failed: bool = False  # whether it has answered with a failure


class EnvironmentPool(WorkerPool):
    """Conversations' environments. At most `processes` start when they are needed, and live as long as the pool."""

    def __init__(self, spec: EnvironmentSpec, processes: int, memory_limit_gb: float | None = None):
        module, memory_key = "rlx.environments.environment_process", "environment.memory_limit_gb"
        super().__init__(module, memory_limit_gb, memory_key, SLACK_S, decode)
        self._spec, self._size = spec, processes
        self._retiring: set[IsolatedProcess] = set()  # get no further conversations: they ran out of memory once
        self._numbers = itertools.count(1)
        self._of_key: dict[int, PooledConversation] = {}
        self._ready: list[tuple[int, Answer]] = []
        self._held: dict[int, PooledConversation] = {}  # by name

    def reset(self, key: int, row: dict[str, Any]) -> None:
        """Begin a conversation of this key, in the process with the fewest; return at once. `row`: see Environment.reset."""
        self.end(key)
        own = self._of_key[key] = PooledConversation(next(self._numbers), key)
        try:
            own.lines.append(json.dumps(["reset", own.number, row], default=as_json))
        except (TypeError, ValueError) as fault:
            reason = f"its row cannot be sent to the environment: {fault}; keep numbers, text, lists and dicts in it"
            self._finish(own, Failure(reason, "error"))
            return
        self._begin(own)

    def hold(self, key: int, name: int) -> list[str]:
        """Keep a conversation that has its last answer under a name, for `restore`; return digests of its answers."""
        own = self._held[name] = self._of_key.pop(key)
        return [*own.answers]

    def restore(self, key: int, name: int, row: dict[str, Any], turns: Sequence[Turn], answers: Sequence[str]) -> None:
        """Go on with a conversation that had these turns and answers, here or in a pool that has ended.

        Without a held one its reset and turns are repeated before its next step, as after the loss of a process.
        """
        own = self._held.pop(name, None)
        if own is None or own.answers != [*answers]:
            if own is not None:
                self._leave_home(own)
            own = PooledConversation(next(self._numbers), key, answers=[*answers])
            own.lines = [json.dumps(["reset", own.number, row], default=as_json)]
            own.lines += [json.dumps(["step", own.number, list(turn)]) for turn in turns]
        own.key = key
        self._of_key[key] = own

    def release(self, names: Container[int] = ()) -> None:
        """End the held conversations but those of these names."""
        for name in [each for each in self._held if each not in names]:
            self._leave_home(self._held.pop(name))

    def step(self, key: int, turn: Turn) -> None:
        """Send a turn of a conversation that has its last answer; return at once."""
        own = self._of_key[key]
        own.lines.append(json.dumps(["step", own.number, list(turn)]))
        if own.failure is not None:
            self._finish(own, own.failure)
        elif own.home is None:
            self._begin(own)
        else:
            self._ask(own, own.home)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Answer]]:
        """Return the answers that are there by key; wait for the first one at most this long. Raises UserCodeError."""
        until = time.monotonic() + timeout_s
        while True:
            wait_s = 0.0 if self._ready else max(0.0, until - time.monotonic())
            for event in self.exchange(wait_s):
                self._take(*event)
            if self._ready or time.monotonic() >= until:
                ready, self._ready = self._ready, []
                return ready

    def end(self, key: int) -> None:
        """Forget a conversation, in whatever state it is; its environment is closed."""
        own = self._of_key.pop(key, None)
        if own is not None:
            self._ready = [(each, answer) for each, answer in self._ready if each != key]
            self._leave_home(own)

    def close(self, patience_s: float = FAREWELL_S) -> None:
        """End all conversations and processes."""
        for key in list(self._of_key):
            self.end(key)
        self.release()
        super().close(patience_s)

    def _begin(self, own: PooledConversation) -> None:
        """Send the reset; the other requests follow when it is answered."""
        open_ones = self.workers - self._retiring
        home = min(open_ones, key=lambda worker: len(worker.guests), default=None)
        if home is None or (home.guests and len(open_ones) < self._size):
            home = self.start()
            home.load(self._spec)
        own.home, own.taken = home, 0
        home.guests.add(own)
        self._ask(own, home)

    def _ask(self, own: PooledConversation, home: IsolatedProcess) -> None:
        home.ask({own.number: own}, own.lines[own.taken], self._spec.limit_s)

    def _leave_home(self, own: PooledConversation) -> None:
        home, own.home = own.home, None
        if home in self.workers:
            home.guests.discard(own)
            home.send(["end", own.number, None])
            if not home.guests:  # the owner may poll again only after a training step
                home.flush()
            self._retire(home)

    def _retire(self, worker: IsolatedProcess) -> None:
        if worker in self._retiring & self.workers and not worker.guests:
            self._retiring.discard(worker)
            self.stop(worker)

    def _take(self, worker: IsolatedProcess, own: PooledConversation, what: Answer | Loaded | Lost) -> None:
        """Handle what came from a process."""
        if isinstance(what, Loaded | Lost):
            if what.fault is not None:
                self.close()
                raise what.fault
            if isinstance(what, Lost):
                self._lose(worker, what)
            return
        if isinstance(what, Failure) and what.kind == "memory":
            self._retiring.add(worker)
            self._retire(worker)
        if self._of_key.get(own.key) is not own or own.has_failed:  # it has ended; an interrupted agent replies, too
            return
        if isinstance(what, Failure):
            self._finish(own, what)
            return
        if own.taken == len(own.answers):
            own.answers.append(_digest(what))
            self._ready.append((own.key, what))
        elif _digest(what) != own.answers[own.taken]:
            reason = "its environment began anew, and then an answer changed, expected the same as before"
            self._finish(own, Failure(f"{reason}. Draw random numbers from row['seed']", "crash"))
            return
        own.taken += 1
        if own.taken < len(own.lines):
            self._ask(own, worker)

    def _finish(self, own: PooledConversation, failure: Failure) -> None:
        own.has_failed = True
        self._leave_home(own)
        self._ready.append((own.key, failure))

    def _lose(self, worker: IsolatedProcess, lost: Lost) -> None:
        """Answer for a process that has ended, or begin again. See Note [whose fault it is]."""
        failure = Failure(lost.how, lost.kind)
        beside = Failure(f"another conversation's call {failure.reason}, in the same process, too often", "crash")
        self._retiring.discard(worker)
        for own in sorted(worker.guests, key=lambda guest: guest.number):
            own.home, fault = None, None
            if own.number == lost.at_work or (own.is_suspect and not lost.at_work):
                fault = failure
            elif lost.at_work:  # it is known whose fault it is
                own.losses += 1
                fault = beside if own.losses > MOST_LOSSES else None
            else:
                own.is_suspect = True
            if own.number not in worker.open:
                own.failure = fault
            elif fault is not None:
                self._finish(own, fault)
            else:
                self._begin(own)


def _digest(answer: Answer) -> str:
    """Return a hash of what the model or the loss sees of an answer; `info` may hold measured seconds, which never come again."""
    seen = replace(answer, info={}) if isinstance(answer, Observation) else answer
    return hashlib.blake2b(json.dumps(seen, default=vars, sort_keys=True).encode(), digest_size=8).hexdigest()
