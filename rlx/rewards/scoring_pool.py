"""Call reward functions in isolated processes, so that none can stop or hang the run.

rlx has its own pool, because `concurrent.futures` gives up a whole pool when one process dies, and `multiprocessing` runs the
driver's main module again in each process. Neither of them runs async functions concurrently, or ends a process that hangs in C
code after its driver was killed. No library above them does so either.

Note [once more]: if a process ends, the driver sends its calls without an outcome again. The call that was at work is to blame. If
it took too long it is lost. If it ended the process the driver sends it once more, alone; the second time it is lost. If no call
was at work, as when a thread crashes, each is sent again alone.
"""

import base64
import math
import pickle
from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import count
from typing import Any, NamedTuple, get_args

from rlx.errors import ExplainedError
from rlx.processes.lines import BadAnswer
from rlx.processes.pool import IsolatedProcess, Loadable, Loaded, Lost, WorkerPool
from rlx.rewards.function import LARGEST_SCORE, Function, Kind, Outcome

SLACK_S = 1.0
"""Longer than the delay of a message on a busy machine [s]."""
MESSAGES_PER_PROCESS = 4
"""The driver sends a process's calls in about this many messages, so that all processes end together."""
HOPELESS = 4
"""If this many calls of a function per process are lost before the first one gets a reply, its others are not tried."""


class NotSendable(ExplainedError, TypeError):
    """Arguments of a call cannot be sent to another process; the cause says why."""


class RewardCall(NamedTuple):
    """One call of a function: its arguments by name, and the number of samples in them."""

    function: Function
    arguments: dict[str, Any]
    samples: int = 1


class ScoringPool(WorkerPool):
    """Calls reward functions in at most `size` processes, which start when they are needed and are reused.

    Each runs `at_once` calls of an async function concurrently, and may allocate `memory_limit_gb` [10^9 bytes; None: any].
    """

    def __init__(self, size: int, memory_limit_gb: float | None, at_once: int):
        module, memory_key = "rlx.rewards.scoring_process", "reward.memory_limit_gb"
        super().__init__(module, memory_limit_gb, memory_key, SLACK_S, to_outcome, (at_once,))
        self.size, self._at_once = size, at_once
        self._async: set[Loadable] = set()
        # By number: calls that are not taken yet, and their outcomes. Those without one are in a process or in one of the three
        # queues: new ones, parts to send again, and those that wait for `take`.
        self._numbers = count(1)
        self._calls: dict[int, RewardCall] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._waiting: dict[Function, deque[int]] = {}
        self._again: deque[list[int]] = deque()
        self._put_off: list[int] = []
        self._puts_off = False  # whether a call that takes too long goes there
        self._busy: set[IsolatedProcess] = set()
        self._ended_with: Counter[int] = Counter()
        self._counts = Counter[str]()  # see `take`
        self._answered: set[Function] = set()
        self._lost: dict[Function, list[Outcome]] = {}  # of functions that have not answered

    def check(self, function: Loadable) -> None:
        """Load a function, or other user code, in one process before the first call. Raises UserCodeError."""
        worker = next(iter(self.workers), None) or self.start()
        worker.load(function)
        while worker.loading:
            for _, _, what in self.exchange():
                if isinstance(what, Loaded | Lost) and what.fault is not None:
                    self.close()
                    raise what.fault
                if isinstance(what, Loaded) and what.is_async:
                    self._async.add(function)

    def run(self, calls: Sequence[RewardCall]) -> tuple[list[Outcome], Counter[str]]:
        """Return the outcome of each call, in order, see Note [once more]. Raises NotSendable if pickle rejects arguments."""
        numbers = [self.add(call) for call in calls]
        outcomes, counts = self.take(numbers)
        return [outcomes[number] for number in numbers], counts

    def add(self, call: RewardCall) -> int:
        """Let a call wait for a process; return its number."""
        number = next(self._numbers)
        self._calls[number] = call
        self._waiting.setdefault(call.function, deque()).append(number)
        return number

    def work(self, most: int, wait_s: float) -> bool:
        """Work on the calls until one ends, at most this long and in so many processes; return False if there was none to wait for.

        The machine is busy with something else, so `take` repeats a call that took too long.
        """
        self._puts_off = True
        return self._advance(most, wait_s)

    def take(self, numbers: Collection[int]) -> tuple[dict[int, Outcome], Counter[str]]:
        """Wait for calls; return their outcomes by number, and what all calls have cost since the last time. Raises as `run`.

        The cost is `retries`, calls that were sent again, and `processes` that ended in a call, by themselves or killed.
        """
        self._again.extend([number] for number in self._put_off)
        self._counts["retries"] += len(self._put_off)
        self._put_off, self._puts_off = [], False
        try:
            for number in numbers:
                while number not in self._outcomes:
                    self._advance(self.size, math.inf)
            outcomes = {number: self._outcomes[number] for number in numbers}
        except BaseException:
            numbers = list(self._calls)
            raise
        finally:
            for number in numbers:
                self.forget(number)
            for worker in [each for each in self._busy if not any(map(self._is_open, each.open))]:
                self._busy.remove(worker)
                self.stop(worker)
            if not self._calls:
                self._answered.clear()
                self._lost.clear()
        counts, self._counts = self._counts, Counter()
        return outcomes, counts

    def forget(self, number: int) -> None:
        """Drop a call."""
        del self._calls[number]
        self._outcomes.pop(number, None)
        self._ended_with.pop(number, None)

    def _is_open(self, number: int) -> bool:
        return number in self._calls and number not in self._outcomes

    def _advance(self, most: int, wait_s: float) -> bool:
        """Start what can be started, and wait for the first event; return whether there was anything to wait for."""
        for function, lost in self._lost.items():
            if len(lost) >= HOPELESS * self.size:
                others = [
                    each for each, call in self._calls.items() if call.function is function and self._is_open(each)
                ]
                self._outcomes |= dict.fromkeys(others, lost[0])
                if others:
                    return False
        while (free := most - len(self._busy)) > 0 and (numbers := self._next_part(free)):
            self._start(numbers)
        if not self._busy:
            return False
        for worker, asked, what in self.exchange(wait_s):
            if worker in self._busy:
                self._note(worker, asked, what)
        self._busy = {worker for worker in self._busy if worker.open}
        return True

    def _next_part(self, free: int) -> list[int]:
        """Return the calls to send next, all of one function; [] if none waits. `free` processes can take some."""
        while self._again:
            if part := [*filter(self._is_open, self._again.popleft())]:
                return part
        for function, waiting in self._waiting.items():
            longest = -(-len(waiting) // (self.size * MESSAGES_PER_PROCESS))
            if function in self._async:  # concurrent calls must be in one message
                longest = max(-(-len(waiting) // self.size), min(self._at_once, -(-len(waiting) // free)))
            part = []
            while waiting and len(part) < longest:
                if self._is_open(number := waiting.popleft()):
                    part.append(number)
            if part:
                return part
        return []

    def _end(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome
        function = self._calls[number].function
        if outcome.kind in ("", "error"):
            self._answered.add(function)
            self._lost.pop(function, None)
        elif function not in self._answered:
            self._lost.setdefault(function, []).append(outcome)

    def _start(self, numbers: list[int]) -> None:
        chosen = [self._calls[number] for number in numbers]
        try:
            content = pickle.dumps([call.arguments for call in chosen], pickle.HIGHEST_PROTOCOL)
        except (TypeError, AttributeError, pickle.PicklingError) as fault:
            if self._puts_off:
                self._put_off += numbers  # `take` raises
                return
            raise NotSendable(
                f"ground_truth or extra_info of a sample cannot be sent to the reward processes ({fault}); keep numbers, "
                "text, lists and dicts in them"
            ) from fault
        worker = next(iter(self.workers - self._busy), None) or self.start()
        self._busy.add(worker)
        samples = [call.samples for call in chosen]
        asked = {number: (number, each) for number, each in zip(numbers, samples, strict=True)}
        code = worker.load(chosen[0].function)
        request = ["call", code, numbers, samples, base64.b64encode(content).decode()]
        worker.ask(asked, request, chosen[0].function.limit_s)

    def _note(self, worker: IsolatedProcess, asked: tuple[int, int], what: Outcome | Loaded | Lost) -> None:
        if isinstance(what, Outcome):
            number = asked[0]
            if not self._is_open(number):
                return
            # A limit in processor time does not depend on how busy the machine is.
            if what.kind == "timeout" and self._puts_off and not self._calls[number].function.cpu_limit_s:
                self._put_off.append(number)
            else:
                self._end(number, what)
        elif isinstance(what, Lost):
            self._busy.remove(worker)
            self._lose(worker, what)
        elif what.fault is not None:
            failed = Outcome([], "error", str(what.fault), str(what.fault.__cause__ or "").lstrip())
            for number in [*filter(self._is_open, worker.open)]:
                self._end(number, failed)
            worker.open.clear()
            self.stop(worker)

    def _lose(self, worker: IsolatedProcess, lost: Lost) -> None:
        """Handle the end of a process, see Note [once more]."""
        self._counts["processes"] += 1
        kind = "timeout" if lost.kind == "timeout" else "crash"
        numbers = sorted(filter(self._is_open, worker.open))
        blamed = [number for number in numbers if number == lost.at_work or len(worker.open) == 1]
        again = [[number for number in numbers if number not in blamed]] if blamed else [[number] for number in numbers]
        self._ended_with.update(blamed or numbers)
        for number in blamed:
            if kind == "timeout" and self._puts_off:
                self._put_off.append(number)
            elif kind == "timeout" or self._ended_with[number] > 1:
                self._end(number, Outcome([], kind, "" if kind == "timeout" else lost.how))
            else:
                again.append([number])
        for part in filter(None, again):
            self._counts["retries"] += len(part)
            self._again.appendleft(part)


def to_outcome(message: Any, asked: dict[int, tuple[int, int]]) -> tuple[int, Outcome]:
    """Read [number of the call, *Outcome]; `asked` has index and number of samples of each call without a reply.

    Raises BadAnswer if it has another form, or replies to a call that was not made or has a reply.
    """
    match message:
        case [int(number), list(answers), str(kind), str(fault), str(traceback)] if (
            number in asked
            and kind in get_args(Kind)
            and len(answers) == (0 if kind else asked[number][1])
            and all(map(_is_answer, answers))
        ):
            return number, Outcome(answers, kind, fault, traceback)  # type: ignore[arg-type]
    raise BadAnswer("sent an answer of another form than rlx's")


def _is_answer(answer: Any) -> bool:
    if isinstance(answer, str):
        return True
    numbers = answer.values() if isinstance(answer, dict) else [None]
    return all(type(each) is float for each in numbers) and abs(answer.get("score", math.nan)) <= LARGEST_SCORE
