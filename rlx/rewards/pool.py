"""Processes in which reward functions run, so that none can stop or hang the run.

Of its own and no library's: `concurrent.futures` gives a whole pool up when one process dies, `multiprocessing` runs the
driver's main module again in each, and neither, nor a library above them, ends a process that a killed driver left
inside C code, or calls async functions side by side.

Note [who ends a call in time]: the driver alone. A process says something at least every FLUSH_S while calls end, so one
that has been silent for a call's limit and SLACK_S hangs in a call, in C code or not, and is killed with all processes
that it has started. Which call it was is not known where several had been sent: see Note [once more].

Note [once more]: the calls that a process had not answered when it ended are sent again, each alone. If it was one, it is
to blame: when it took too long it is lost, when it ended the process it is sent once more and lost the second time.
"""

import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from rlx.rewards.function import Function, Loadable, Outcome
from rlx.rewards.process import OUT_OF_MEMORY
from rlx.user_code import UserCodeError

LOAD_LIMIT_S = 300.0
"""Longest import of a function's file."""
SLACK_S = 1.0
"""Above FLUSH_S, and above what a busy machine may delay a message."""
MESSAGES_PER_PROCESS = 4
"""Calls of one process are sent in about so many messages, so that all processes end together."""
CALLS_PER_MESSAGE = 256
HOPELESS = 4
"""Calls lost, in each process, before the first one is answered: then the others are not tried."""


class InProcess(Exception):
    """What happened in a reward process; its text is the traceback there."""


class NotSendable(TypeError):
    """Arguments of a call that cannot go to another process."""


class Call(NamedTuple):
    """One call of a function: its arguments by name, and how many samples they are."""

    function: Function
    arguments: dict[str, Any]
    samples: int = 1


class Counts(NamedTuple):
    """What it took to get the outcomes: calls sent again, and processes that ended in a call, by themselves or killed."""

    retries: int = 0
    processes: int = 0


class _Process:
    """One reward process.

    Attributes:
        connection: what is waited on.
        deadline: when it has been silent for too long.
        unanswered: places of the calls that it was sent, among those of the run.
    """

    def __init__(self, memory_bytes: int, at_once: int):
        # The same import path as ours, however we came by it. Processes share the cores, so each takes one.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self.connection, theirs = Pipe()
        with theirs:
            arguments = (theirs.fileno(), os.getpid(), memory_bytes, at_once)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlx.rewards.process", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what functions print is no output of the driver's
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the driver's to handle; and what a function starts can be ended too
            )
        self._loaded: set[Loadable] = set()
        self._sent: list[int] = []
        self.unanswered: set[int] = set()
        self.deadline = math.inf

    def load(self, function: Loadable) -> None:
        """Asks for a function's import."""
        self._loading = function
        self.deadline = time.monotonic() + LOAD_LIMIT_S
        self._send((id(function), function))

    def loading(self) -> tuple[bool, UserCodeError | None, str]:
        """The answer to `load`. Raises EOFError or OSError where the process ended, TimeoutError where it takes too long."""
        if not self.connection.poll(max(0.0, self.deadline - time.monotonic())):
            raise TimeoutError
        answer: tuple[bool, UserCodeError | None, str] = self.connection.recv()
        if answer[1] is None:
            self._loaded.add(self._loading)
        return answer

    def begin(self, places: list[int], function: Function, samples: list[int], payload: bytes) -> None:
        """Sends the calls at these places, once their function is loaded."""
        self._sent, self.unanswered = places, set(places)
        self._calls, self._function = (id(function), samples, payload), function
        if function in self._loaded:
            self._send_calls()
        else:
            self.load(function)

    def receive(self) -> list[tuple[int, Outcome]]:
        """Outcomes by their places in the run; none where it has only loaded the function.

        Raises:
            EOFError, OSError: it has ended.
        """
        if self._function not in self._loaded:
            _, fault, traceback = self.loading()
            if fault is None:
                self._send_calls()
                return []
            outcomes = list(enumerate([Outcome([], "error", str(fault), traceback)] * len(self._sent)))
        else:
            outcomes = self.connection.recv()
            self.deadline = time.monotonic() + self._function.limit_s + SLACK_S
        found = [(self._sent[number], outcome) for number, outcome in outcomes]
        self.unanswered.difference_update(place for place, _ in found)
        return found

    def _send_calls(self) -> None:
        self.deadline = time.monotonic() + self._function.limit_s + SLACK_S
        self._send(self._calls)

    def _send(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended, as the next thing received will say
            self.connection.send(message)

    def end(self) -> str:
        """Kills it and all that it has started. How it had ended before that, if it had."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.connection.close()
        if code == OUT_OF_MEMORY:
            return "ran out of memory (reward.memory_limit_gb)"
        return f"ended its process ({f'exit code {code}' if code >= 0 else signal.Signals(-code).name})"


class ProcessPool:
    """Calls reward functions in processes; a context. Processes start when they are needed and stay.

    Args:
        size: processes.
        memory_limit_gb: what each may allocate [10^9 bytes]; None: anything.
        at_once: calls of an async function that each process runs at a time.
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
        """Ends the processes. A later call starts new ones."""
        while self._idle:
            self._idle.pop().end()

    def check(self, function: Loadable) -> None:
        """Loads a function, or what else a user wrote, in one process, so that what is wrong with it shows before the first call.

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
            raise fault from (InProcess(f"\n{traceback}") if traceback else None)

    def run(self, calls: Sequence[Call]) -> tuple[list[Outcome], Counts]:
        """The outcome of each call, in order. See Note [who ends a call in time] and Note [once more].

        Raises:
            NotSendable: arguments that pickle does not take.
        """
        run = _Run(self, calls, deque(self._cut(calls)))
        try:
            run.to_the_end()
        finally:
            for process in run.busy:
                process.end()
        return [run.outcomes[place] for place in range(len(calls))], Counts(run.retries, run.processes)

    def take(self) -> _Process:
        """A process that has nothing to do."""
        return self._idle.pop() if self._idle else _Process(*self._options)

    def give(self, process: _Process) -> None:
        """Takes it back."""
        self._idle.append(process)

    def _cut(self, calls: Sequence[Call]) -> list[list[int]]:
        """The places of the calls that are sent together."""
        places: dict[Function, list[int]] = {}
        for place, call in enumerate(calls):
            places.setdefault(call.function, []).append(place)
        parts = []
        for function, own in places.items():
            # Calls of an async function wait for each other only in their process.
            messages = self.size if function in self._async else self.size * MESSAGES_PER_PROCESS
            most = len(own) if function in self._async else CALLS_PER_MESSAGE
            length = min(most, -(-len(own) // messages))
            parts += [own[first : first + length] for first in range(0, len(own), length)]
        return parts


class _Run:
    """The calls of one batch on their way: those that wait, those in processes, and the outcomes so far by place."""

    def __init__(self, pool: ProcessPool, calls: Sequence[Call], waiting: deque[list[int]]):
        self._pool, self._calls, self._waiting = pool, calls, waiting
        self.busy: set[_Process] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.retries = self.processes = 0
        self._ended_with = [0] * len(calls)
        self._answered = False

    def to_the_end(self) -> None:
        """Until each call has its outcome."""
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
        """Takes what the processes say until one says something or has been silent for too long."""
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
        except (EOFError, OSError):
            self.busy.remove(process)
            self._lose(process, Outcome([], "crash", process.end()))
            return
        self.outcomes.update(found)
        self._answered = self._answered or any(outcome.kind in ("", "error") for _, outcome in found)
        if not process.unanswered:
            self.busy.remove(process)
            self._pool.give(process)

    def _lose(self, process: _Process, outcome: Outcome) -> None:
        """A process has ended: which call is to blame is known, or found out one by one."""
        self.processes += 1
        alone = len(process.unanswered) == 1
        for place in sorted(process.unanswered):
            self._ended_with[place] += 1
            if alone and (outcome.kind == "timeout" or self._ended_with[place] > 1):
                self.outcomes[place] = outcome
            else:
                self.retries += 1
                self._waiting.appendleft([place])
