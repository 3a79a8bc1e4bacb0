"""Processes for reward functions, so that no function can stop or hang the run.

rlx has its own pool, because `concurrent.futures` gives up a whole pool when one process dies, and `multiprocessing` runs the
driver's main module again in each process. Neither of them runs async functions concurrently, or ends a process that hangs in C
code after its driver was killed. No library above them does so either.

Note [who ends a call in time]: the driver, for any call. A process sends a message at least every FLUSH_S while calls end. If it is
silent for a call's limit plus SLACK_S, it hangs in a call, in C code or not. The driver then kills it and all processes that it
started. If it had several calls, the driver does not know which one hung: see Note [once more]. A function of rlx's own may have
a `cpu_limit_s`: then its process interrupts a longer call and lives on.

Note [once more]: if a process ends, the driver sends its calls without an outcome again, each alone. A call that was alone is
to blame. If it took too long it is lost. If it ended the process the driver sends it once more; the second time it is lost.
"""

import contextlib
import math
import pickle
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from rlx.errors import cause_of
from rlx.processes.lines import BadAnswer, Lines
from rlx.processes.parent import LOAD_LIMIT_S, ChildProcess
from rlx.rewards.answers import Loaded, to_loaded, to_outcomes
from rlx.rewards.function import Function, Loadable, Outcome
from rlx.user_code import UserCodeError

SLACK_S = 1.0
"""Longer than FLUSH_S and than the delay of a message on a busy machine [s]."""
MESSAGES_PER_PROCESS = 4
"""The driver sends a process's calls in about this many messages, so that all processes end together."""
CALLS_PER_MESSAGE = 256
HOPELESS = 4
"""If this many calls per process are lost before the first one is answered, the others are not tried."""


class NotSendable(TypeError):
    """Arguments of a call cannot be sent to another process."""


class RewardCall(NamedTuple):
    """One call of a function: its arguments by name, and the number of samples in them."""

    function: Function
    arguments: dict[str, Any]
    samples: int = 1


class Counts(NamedTuple):
    """The cost of the outcomes: calls sent again, and processes that ended in a call, by themselves or killed."""

    retries: int = 0
    processes: int = 0


class _Process:
    """One reward process.

    Attributes:
        connection: for messages in both directions.
        deadline: the time at which it has been silent for too long.
        unanswered: indices in the run of the calls that it received and has not answered.
    """

    def __init__(self, memory_bytes: int, at_once: int):
        self.connection, theirs = Pipe()
        with theirs:
            self._process = ChildProcess(
                "rlx.rewards.process", theirs.fileno(), (memory_bytes, at_once), "reward.memory_limit_gb"
            )
        self._lines = Lines(self.connection.fileno())
        self._loaded: set[Loadable] = set()
        self._sent: list[int] = []
        self.unanswered: set[int] = set()
        self.deadline = math.inf

    def load(self, function: Loadable) -> None:
        """Request a function's import."""
        self._loading = function
        self.deadline = time.monotonic() + LOAD_LIMIT_S
        self._send((id(function), function))

    def loading(self) -> Loaded:
        """Return the reply to `load`. Raises EOFError or OSError if the process ended, TimeoutError if it takes too long."""
        while self.connection.poll(max(0.0, self.deadline - time.monotonic())):
            if messages := self._lines.read():
                return self._loaded_by(messages)
        raise TimeoutError

    def _loaded_by(self, messages: list[Any]) -> Loaded:
        loaded = to_loaded(messages[0])
        if loaded[1] is None:
            self._loaded.add(self._loading)
        return loaded

    def begin(self, places: list[int], function: Function, samples: list[int], payload: bytes) -> None:
        """Send the calls at these indices, after loading their function."""
        self._sent, self.unanswered = places, set(places)
        self._calls, self._function = (id(function), samples, payload), function
        if function in self._loaded:
            self._send_calls()
        else:
            self.load(function)

    def receive(self) -> list[tuple[int, Outcome]]:
        """Return outcomes by their indices in the run; none if the process has only loaded the function.

        Raises:
            EOFError, OSError: the process has ended, or what it sent is no answer.
        """
        messages = self._lines.read()
        if not messages:
            return []
        if self._function not in self._loaded:
            _, fault, traceback = self._loaded_by(messages)
            if fault is None:
                self._send_calls()
                return []
            outcomes = list(enumerate([Outcome([], "error", str(fault), traceback)] * len(self._sent)))
        else:
            unanswered = {number for number, place in enumerate(self._sent) if place in self.unanswered}
            joined = [
                record for message in messages for record in (message if isinstance(message, list) else [message])
            ]
            outcomes = to_outcomes(joined, self._calls[1], unanswered)
            self.deadline = time.monotonic() + self._function.limit_s + SLACK_S
        found = [(self._sent[number], outcome) for number, outcome in outcomes]
        self.unanswered.difference_update(place for place, _ in found)
        return found

    def _send_calls(self) -> None:
        self.deadline = time.monotonic() + self._function.limit_s + SLACK_S
        self._send(self._calls)

    def _send(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(ConnectionError):  # the process has ended; the next `receive` raises
            self.connection.send(message)

    def end(self) -> str:
        """Kill it and all processes it started; return in words how it ended if it had ended before."""
        how = self._process.end()
        self.connection.close()
        return how


class ProcessPool:
    """Calls reward functions in processes. A context; processes start when they are needed and are reused.

    Args:
        size: largest number of processes.
        memory_limit_gb: memory that each may allocate [10^9 bytes]; None: no limit.
        at_once: calls of an async function that each process runs concurrently.
    """

    def __init__(self, size: int, memory_limit_gb: float | None, at_once: int):
        self.size = size
        self._options = int((memory_limit_gb or 0) * 1e9), at_once
        self._idle: list[_Process] = []
        self._async: set[Loadable] = set()

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        while self._idle:
            self._idle.pop().end()

    def check(self, function: Loadable) -> None:
        """Load a function, or other code of a user, in one process, so that errors show before the first call.

        Raises:
            UserCodeError: it cannot be loaded.
        """
        process = self.take()
        process.load(function)
        try:
            is_async, fault, traceback = process.loading()
        except (EOFError, OSError) as error:
            how = process.end()
            how = f"takes longer than {LOAD_LIMIT_S:g} s" if isinstance(error, TimeoutError) else how
            raise UserCodeError(f"the import of {function.source} {how}; expected one that comes to its end") from None
        except BaseException:
            process.end()
            raise
        self.give(process)
        if is_async:
            self._async.add(function)
        if fault is not None:
            raise fault from cause_of(traceback)

    def run(self, calls: Sequence[RewardCall]) -> tuple[list[Outcome], Counts]:
        """Return the outcome of each call, in order. See Note [who ends a call in time] and Note [once more].

        Raises:
            NotSendable: pickle refuses the arguments.
        """
        run = _Run(self, calls, deque(self._cut(calls)))
        try:
            run.to_the_end()
        finally:
            for process in run.busy:
                process.end()
        return [run.outcomes[place] for place in range(len(calls))], Counts(run.retries, run.processes)

    def take(self) -> _Process:
        """Return an idle process, or a new one."""
        return self._idle.pop() if self._idle else _Process(*self._options)

    def give(self, process: _Process) -> None:
        """Return a process to the idle ones."""
        self._idle.append(process)

    def _cut(self, calls: Sequence[RewardCall]) -> list[list[int]]:
        """Return the indices of the calls that are sent together."""
        places: dict[Function, list[int]] = {}
        for place, call in enumerate(calls):
            places.setdefault(call.function, []).append(place)
        parts = []
        for function, own in places.items():
            # Concurrent calls of an async function must be in one process.
            messages = self.size if function in self._async else self.size * MESSAGES_PER_PROCESS
            most = len(own) if function in self._async else CALLS_PER_MESSAGE
            length = min(most, -(-len(own) // messages))
            parts += [own[first : first + length] for first in range(0, len(own), length)]
        return parts


class _Run:
    """The calls of one batch: waiting ones, those in processes, and outcomes by index."""

    def __init__(self, pool: ProcessPool, calls: Sequence[RewardCall], waiting: deque[list[int]]):
        self._pool, self._calls, self._waiting = pool, calls, waiting
        self.busy: set[_Process] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.retries = self.processes = 0
        self._ended_with = [0] * len(calls)
        self._answered = False

    def to_the_end(self) -> None:
        """Run until each call has its outcome."""
        while self._waiting or self.busy:
            while self._waiting and len(self.busy) < self._pool.size:
                self._start(self._waiting.popleft())
            self._listen()
            if not self._answered and len(self.outcomes) >= HOPELESS * self._pool.size:
                example = next(iter(self.outcomes.values()))
                self.outcomes = dict.fromkeys(range(len(self._calls)), example) | self.outcomes
                return

    def _start(self, places: list[int]) -> None:
        chosen = [self._calls[place] for place in places]
        try:
            payload = pickle.dumps([call.arguments for call in chosen], pickle.HIGHEST_PROTOCOL)
        except (TypeError, AttributeError, pickle.PicklingError) as fault:
            raise NotSendable(str(fault)) from fault
        process = self._pool.take()
        self.busy.add(process)
        process.begin(places, chosen[0].function, [call.samples for call in chosen], payload)

    def _listen(self) -> None:
        """Receive outcomes until a process sends one or has been silent for too long."""
        by_connection = {process.connection: process for process in self.busy}
        deadline = min(process.deadline for process in self.busy)
        for connection in wait(list(by_connection), max(0.0, deadline - time.monotonic())):
            self._receive(by_connection[connection])
        for process in [each for each in self.busy if time.monotonic() > each.deadline]:
            self.busy.remove(process)
            process.end()
            self._lose(process, Outcome([], "timeout"))

    def _receive(self, process: _Process) -> None:
        try:
            found = process.receive()
        except (EOFError, OSError) as fault:
            self.busy.remove(process)
            how = process.end()
            self._lose(process, Outcome([], "crash", str(fault) if isinstance(fault, BadAnswer) else how))
            return
        self.outcomes.update(found)
        self._answered = self._answered or any(outcome.kind in ("", "error") for _, outcome in found)
        if not process.unanswered:
            self.busy.remove(process)
            self._pool.give(process)

    def _lose(self, process: _Process, outcome: Outcome) -> None:
        """Handle the end of a process: blame a call that was alone, else send the calls again one by one."""
        self.processes += 1
        alone = len(process.unanswered) == 1
        for place in sorted(process.unanswered):
            self._ended_with[place] += 1
            if alone and (outcome.kind == "timeout" or self._ended_with[place] > 1):
                self.outcomes[place] = outcome
            else:
                self.retries += 1
                self._waiting.appendleft([place])
