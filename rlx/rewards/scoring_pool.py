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
from collections import deque
from collections.abc import Sequence
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
"""If this many calls per process are lost before the first one gets a reply, the others are not tried."""


class NotSendable(ExplainedError, TypeError):
    """Arguments of a call cannot be sent to another process; the cause says why."""


class RewardCall(NamedTuple):
    """One call of a function: its arguments by name, and the number of samples in them."""

    function: Function
    arguments: dict[str, Any]
    samples: int = 1


class Counts(NamedTuple):
    """The cost of the outcomes: calls sent again, and processes that ended in a call, by themselves or killed."""

    retries: int = 0
    processes: int = 0


class ScoringPool(WorkerPool):
    """Calls reward functions in processes, which start when they are needed and are reused.

    Args:
        size: largest number of processes.
        memory_limit_gb: memory that each may allocate [10^9 bytes]; None: no limit.
        at_once: calls of an async function that each process runs concurrently.
    """

    def __init__(self, size: int, memory_limit_gb: float | None, at_once: int):
        module, memory_key = "rlx.rewards.scoring_process", "reward.memory_limit_gb"
        super().__init__(module, memory_limit_gb, memory_key, SLACK_S, to_outcome, (at_once,))
        self.size = size
        self._async: set[Loadable] = set()

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

    def run(self, calls: Sequence[RewardCall]) -> tuple[list[Outcome], Counts]:
        """Return the outcome of each call, in order, see Note [once more]. Raises NotSendable if pickle rejects arguments."""
        places: dict[Function, list[int]] = {}
        for place, call in enumerate(calls):
            places.setdefault(call.function, []).append(place)
        parts: deque[list[int]] = deque()  # indices of calls that are sent together
        for function, own in places.items():
            # Concurrent calls of an async function must be in one message.
            messages = self.size * (1 if function in self._async else MESSAGES_PER_PROCESS)
            length = -(-len(own) // messages)
            parts += [own[first : first + length] for first in range(0, len(own), length)]
        run = _Run(self, calls, parts)
        try:
            run.to_the_end()
        finally:
            for worker in run.busy & self.workers:
                self.stop(worker)
        return [run.outcomes[place] for place in range(len(calls))], Counts(run.retries, run.processes)


class _Run:
    """The calls of one batch: waiting ones, those in processes, and outcomes by index. A request's number is its index + 1."""

    def __init__(self, pool: ScoringPool, calls: Sequence[RewardCall], waiting: deque[list[int]]):
        self._pool, self._calls, self._waiting = pool, calls, waiting
        self.busy: set[IsolatedProcess] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.retries = self.processes = 0
        self._ended_with = [0] * len(calls)
        self._answered = False

    def to_the_end(self) -> None:
        """Run until each call has its outcome."""
        while self._waiting or self.busy:
            while self._waiting and len(self.busy) < self._pool.size:
                self._start(self._waiting.popleft())
            for worker, asked, what in self._pool.exchange():
                if worker in self.busy:
                    self._take(worker, asked, what)
            self.busy = {worker for worker in self.busy if worker.open}
            if not self._answered and len(self.outcomes) >= HOPELESS * self._pool.size:
                example = next(iter(self.outcomes.values()))
                self.outcomes = dict.fromkeys(range(len(self._calls)), example) | self.outcomes
                return

    def _start(self, places: list[int]) -> None:
        chosen = [self._calls[place] for place in places]
        try:
            content = pickle.dumps([call.arguments for call in chosen], pickle.HIGHEST_PROTOCOL)
        except (TypeError, AttributeError, pickle.PicklingError) as fault:
            raise NotSendable(
                f"ground_truth or extra_info of a sample cannot be sent to the reward processes ({fault}); keep numbers, "
                "text, lists and dicts in them"
            ) from fault
        worker = next(iter(self._pool.workers - self.busy), None) or self._pool.start()
        self.busy.add(worker)
        numbers, samples = [place + 1 for place in places], [call.samples for call in chosen]
        asked = {number: (number - 1, count) for number, count in zip(numbers, samples, strict=True)}
        number = worker.load(chosen[0].function)
        request = ["call", number, numbers, samples, base64.b64encode(content).decode()]
        worker.ask(asked, request, chosen[0].function.limit_s)

    def _take(self, worker: IsolatedProcess, asked: tuple[int, int], what: Outcome | Loaded | Lost) -> None:
        if isinstance(what, Outcome):
            self.outcomes[asked[0]] = what
            self._answered |= what.kind in ("", "error")
        elif isinstance(what, Lost):
            self.busy.remove(worker)
            self._lose(worker, what)
        elif what.fault is not None:
            failed = Outcome([], "error", str(what.fault), str(what.fault.__cause__ or "").lstrip())
            self.outcomes |= {place: failed for place, _ in worker.open.values()}
            self._answered = True
            worker.open.clear()
            self._pool.stop(worker)

    def _lose(self, worker: IsolatedProcess, lost: Lost) -> None:
        """Handle the end of a process, see Note [once more]."""
        self.processes += 1
        kind = "timeout" if lost.kind == "timeout" else "crash"
        places = sorted(place for place, _ in worker.open.values())
        blamed = [place for place in places if place == lost.at_work - 1 or len(places) == 1]
        again = [[place for place in places if place not in blamed]] if blamed else [[place] for place in places]
        for place in blamed or places:
            self._ended_with[place] += 1
        for place in blamed:
            if kind == "timeout" or self._ended_with[place] > 1:
                self.outcomes[place] = Outcome([], kind, "" if kind == "timeout" else lost.how)
            else:
                again.append([place])
        for part in filter(None, again):
            self.retries += len(part)
            self._waiting.appendleft(part)


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
