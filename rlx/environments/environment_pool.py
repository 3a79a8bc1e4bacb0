"""Environments in processes, so that none can stop or hang the sampler beside them.

Note [whose fault it is]: a call that takes too long in Python is interrupted and fails its own conversation alone. If code in C hangs,
crashes or ends the process, all its environments are lost. The process notes whose code is running, so that conversation fails. The
others restart in another process: rlx repeats their reset and turns, and the answers must be the same, apart from `info`. After
`MOST_LOSSES` restarts a conversation fails with its next process. If no code was running, as when a thread crashes, any of them may be at
fault, so each fails with its second process.

Note [one answer each]: every `reset` and `step` gets exactly one answer from `poll`, unless `end` comes first.
"""

import itertools
import json
import time
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


@dataclass
class _Conversation:
    """The requests and answers of a conversation, so that it can restart.

    Attributes:
        number: unique, because keys are reused.
        key: of the pool's user.
        lines: requests: the reset and steps.
        answers: to them.
        home: process of its environment; None if it restarts with its next step, or has failed.
        taken: answers of the current environment; fewer than `answers` while it catches up.
        losses: processes that others ended.
        is_suspect: whether it lost one in which no code was running.
        failure: answer to its next step.
        has_failed: whether it has answered with a failure.
    """

    number: int
    key: int
    lines: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    home: IsolatedProcess | None = None
    taken: int = 0
    losses: int = 0
    is_suspect: bool = False
    failure: Failure | None = None
    has_failed: bool = False


class EnvironmentPool:
    """Conversations' environments. A context; processes start when they are needed and live as long as the pool.

    They end with the thread that makes them, so one thread uses the pool and lives longer than it.

    Args:
        spec: of the environments.
        processes: largest number of processes.
        memory_limit_gb: memory that each process may allocate [10^9 bytes]; None: no limit.
    """

    def __init__(self, spec: EnvironmentSpec, processes: int, memory_limit_gb: float | None = None):
        self._spec, self._size = spec, processes
        self._workers = WorkerPool(
            "rlx.environments.environment_process", memory_limit_gb, "environment.memory_limit_gb", SLACK_S, decode
        )
        self._lives: dict[IsolatedProcess, set[int]] = {}  # numbers of the conversations in each process
        self._retiring: set[IsolatedProcess] = (
            set()
        )  # get no further conversations, because they ran out of memory once
        self._numbers = itertools.count(1)
        self._of_number: dict[int, _Conversation] = {}
        self._of_key: dict[int, _Conversation] = {}
        self._ready: list[tuple[int, Answer]] = []

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self, key: int, row: dict[str, Any]) -> None:
        """Begin a conversation, in the process with the fewest; return at once.

        Args:
            key: of the conversation, until `end`.
            row: see Environment.reset; numpy's values are sent as Python's.
        """
        self.end(key)
        own = _Conversation(next(self._numbers), key)
        self._of_number[own.number] = self._of_key[key] = own
        try:
            own.lines.append(json.dumps(["reset", own.number, row], default=as_json))
        except (TypeError, ValueError) as fault:
            self._finish(own, Failure(f"its row cannot be sent to the environment: {fault}", "error"))
            return
        self._begin(own)

    def step(self, key: int, turn: Turn) -> None:
        """Send a turn of a conversation that has its last answer; return at once."""
        own = self._of_key[key]
        if own.has_failed:
            raise ValueError(f"conversation {key} has failed, expected one that goes on; begin it again with reset")
        own.lines.append(json.dumps(["step", own.number, list(turn)]))
        if own.failure is not None:
            self._finish(own, own.failure)
        elif own.home is None:
            self._begin(own)
        else:
            own.home.ask({own.number: "step"}, own.lines[-1], self._spec.limit_s)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Answer]]:
        """Return the answers that are there by key; wait for the first one at most this long [seconds].

        Raises:
            UserCodeError: the environment cannot be loaded.
        """
        until = time.monotonic() + timeout_s
        while True:
            wait_s = 0.0 if self._ready else max(0.0, until - time.monotonic())
            for event in self._workers.exchange(wait_s):
                self._take(*event)
            if self._ready or time.monotonic() >= until:
                ready, self._ready = self._ready, []
                return ready

    def flush(self) -> None:
        """Write the requests that wait, so that environments work before the next `poll`; return at once."""
        self._workers.flush()

    def end(self, key: int) -> None:
        """Forget a conversation, in whatever state it is; its environment is closed."""
        own = self._of_key.pop(key, None)
        if own is None:
            return
        del self._of_number[own.number]
        self._ready = [(each, answer) for each, answer in self._ready if each != key]
        self._leave_home(own)

    def close(self) -> None:
        """End all conversations and processes."""
        for key in list(self._of_key):
            self.end(key)
        self._workers.close(FAREWELL_S)
        self._lives.clear()

    def _begin(self, own: _Conversation) -> None:
        """Send the reset; the other requests follow when it is answered."""
        open_ones = self._lives.keys() - self._retiring
        home = min(open_ones, key=lambda worker: len(self._lives[worker]), default=None)
        if home is None or (self._lives[home] and len(open_ones) < self._size):
            home = self._workers.start()
            self._lives[home] = set()
            home.load(self._spec)
        own.home, own.taken = home, 0
        self._lives[home].add(own.number)
        home.ask({own.number: "reset"}, own.lines[0], self._spec.limit_s)

    def _leave_home(self, own: _Conversation) -> None:
        home, own.home = own.home, None
        if home is None or own.number not in self._lives.get(home, ()):
            return
        self._lives[home].discard(own.number)
        home.send(json.dumps(["end", own.number, None]))
        if not self._lives[home]:  # the owner may poll again only after a training step
            home.flush()
        self._retire(home)

    def _retire(self, worker: IsolatedProcess) -> None:
        if worker in self._retiring & self._workers.workers and not self._lives[worker]:
            self._retiring.discard(worker)
            del self._lives[worker]
            self._workers.end(worker)

    def _take(self, worker: IsolatedProcess, number: int, what: Answer | Loaded | Lost) -> None:
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
        own = self._of_number.get(number)
        if own is None:
            return
        if isinstance(what, Failure):
            self._finish(own, what)
            return
        if own.taken == len(own.answers):
            own.answers.append(what)
            self._ready.append((own.key, what))
        elif _without_info(what) != _without_info(own.answers[own.taken]):
            reason = "its process ended, and after the restart an answer changed, expected the same as before"
            self._finish(own, Failure(f"{reason}. Draw random numbers from row['seed']", "crash"))
            return
        own.taken += 1
        if own.taken < len(own.lines):
            worker.ask({own.number: "step"}, own.lines[own.taken], self._spec.limit_s)

    def _finish(self, own: _Conversation, failure: Failure) -> None:
        own.has_failed = True
        self._leave_home(own)
        self._ready.append((own.key, failure))

    def _lose(self, worker: IsolatedProcess, lost: Lost) -> None:
        """Answer for a process that has ended, or begin again. See Note [whose fault it is]."""
        failure = Failure(lost.how, lost.kind)
        beside = Failure(f"another conversation's call {failure.reason}, in the same process, too often", "crash")
        is_known = lost.at_work != 0  # whose fault it is
        self._retiring.discard(worker)
        for number in sorted(self._lives.pop(worker, ())):
            own = self._of_number[number]
            own.home, is_open, fault = None, number in worker.open, None
            if number == lost.at_work or (own.is_suspect and not is_known):
                fault = failure
            elif is_known:
                own.losses += 1
                fault = beside if own.losses > MOST_LOSSES else None
            else:
                own.is_suspect = True
            if fault is not None and is_open:
                self._finish(own, fault)
            elif fault is not None:
                own.failure = fault
            elif is_open:
                self._begin(own)


def _without_info(answer: Answer) -> Answer:
    """Return the part of an answer that the model or the loss sees; `info` may hold measured seconds, which never come again."""
    return replace(answer, info={}) if isinstance(answer, Observation) else answer
