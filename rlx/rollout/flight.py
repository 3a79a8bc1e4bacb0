"""Requests in flight: what all samplers share. It numbers requests, counts them, and lets the ranks of a group agree."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar, cast

import torch.distributed as dist

from rlx.rollout.protocol import Completion, EngineError, Request, Rollout

T = TypeVar("T")


class RequestsInFlight(ABC):
    """The part of `Rollout` that deals with requests; samplers subclass it.

    Args:
        max_num_seqs: requests that are decoded at once; more wait.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._requests: dict[int, Request] = {}  # those in flight by number, oldest first
        self._numbers = count()
        self._load = SamplerLoad(max_num_seqs)

    @property
    @abstractmethod
    def version(self) -> int | None:
        """See Rollout."""

    @abstractmethod
    def _fault(self, request: Request) -> str | None:
        """Return why the request cannot be completed, as a continuation of "the request …"; None if it can."""

    @abstractmethod
    def _advance(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        """Do one step on the requests in flight, at least one; see `Rollout.step`."""

    def _enter(self, number: int, request: Request) -> None:  # noqa: B027
        """Hear of a new request; the sampler has weights."""

    def _leave(self, numbers: Sequence[int]) -> None:  # noqa: B027
        """Free all that requests hold, because they are aborted."""

    @property
    def running(self) -> int:
        """See Rollout."""
        return len(self._requests)

    def add_request(self, request: Request) -> int:
        """See Rollout."""
        self._require_weights("add_request")
        fault = self._fault(request)
        if fault:
            raise ValueError(f"add_request: the request {fault}")
        return self._add(request)

    def step(self) -> list[tuple[int, Completion]]:
        """See Rollout."""
        if not self._requests:
            return []
        try:
            stopped = self._advance(self._requests)
        except EngineError:
            self._requests.clear()  # the failed engine has lost them
            raise
        for number, _ in stopped:
            del self._requests[number]
        self._load.note(self.running, has_stopped=bool(stopped))
        return stopped

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """See Rollout."""
        ended = list(self._requests if numbers is None else dict.fromkeys(numbers))
        unknown = [number for number in ended if number not in self._requests]
        if unknown:
            raise ValueError(
                f"abort: got {unknown[0]}, expected the number of one of {self.running} requests in flight; a request that has "
                "stopped is no longer in flight"
            )
        self._leave(ended)
        for number in ended:
            del self._requests[number]
        self._load.note(self.running)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See Rollout."""
        self._require_weights("generate")
        self._refuse_in_flight("generate")
        for index, request in enumerate(requests):
            fault = self._fault(request)
            if fault:
                raise ValueError(f"generate: request {index} {fault}")
        completions: dict[int, Completion] = {}
        with aborting(self):
            numbers = [self._add(request) for request in requests]
            while self._requests:
                completions.update(self.step())
        return [completions[number] for number in numbers]

    def take_load(self) -> dict[str, float]:
        """See Rollout."""
        load, self._load = self._load, SamplerLoad(self.max_num_seqs)
        self._load.note(self.running)
        return load.figures()

    def _add(self, request: Request) -> int:
        number = next(self._numbers)
        self._enter(number, request)
        self._requests[number] = request
        self._load.note(self.running)
        return number

    def _require_weights(self, method: str) -> None:
        if self.version is None:
            raise ValueError(f"{method}: no complete set of weights has arrived; call update_weights first")

    def _refuse_in_flight(self, method: str) -> None:
        if self._requests:
            raise ValueError(
                f"{method}: got {self.running} requests in flight, expected none; call step until they have stopped, or abort them"
            )


@contextlib.contextmanager
def aborting(rollout: Rollout) -> Iterator[None]:
    """Abort what is still in flight at the end, also after an error: a sampler with requests neither sleeps nor takes weights."""
    try:
        yield
    finally:
        if rollout.running:
            rollout.abort()


class SamplerLoad:
    """How busy a sampler was, from the times at which the number of its requests in flight changed.

    Args:
        max_num_seqs: requests that it decodes at once; those beyond wait and are not counted as running.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._places = max_num_seqs
        self._running = self._most = 0
        self._request_seconds = 0.0
        self._start: float | None = None  # of the first request
        self._last = 0.0
        self._stops: tuple[float, float] | None = None  # the first and the last

    def note(self, in_flight: int, has_stopped: bool = False) -> None:
        """Note the number of requests in flight from now on, and whether one of them has just been completed."""
        now = time.monotonic()
        if self._start is None:
            if not in_flight:
                return
            self._start = self._last = now
        self._request_seconds += self._running * (now - self._last)
        self._running, self._last = min(in_flight, self._places), now
        self._most = max(self._most, self._running)
        if has_stopped:
            self._stops = (self._stops[0] if self._stops else now, now)

    def figures(self) -> dict[str, float]:
        """Return the load from the first request to the last change; {} without requests.

        Returns:
            running_mean: requests that were decoded, averaged over time. Moments without any count as 0.
            running_max: the most at any time.
            busy_share: running_mean / max_num_seqs.
            tail_s: from the first completion to the last [s].
        """
        if self._start is None:
            return {}
        mean = self._request_seconds / max(self._last - self._start, 1e-9)
        first, last = self._stops or (0.0, 0.0)
        return {
            "running_mean": mean,
            "running_max": float(self._most),
            "busy_share": mean / self._places,
            "tail_s": last - first,
        }


def joined_loads(loads: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return one load for several calls or processes: means of running_mean and busy_share, the largest of the others."""
    known = [load for load in loads if load]
    return {
        name: sum(load[name] for load in known) / len(known)
        if name in ("running_mean", "busy_share")
        else max(load[name] for load in known)
        for name in (known[0] if known else ())
    }


class FirstRank:
    """Lets the ranks of a tensor-parallel group see one order of events.

    The ranks run the same program, but an event outside, such as a tool's answer, comes at other times on each. So the first
    rank alone looks at the outside, and the others take over what it saw:

        arrived = first_rank.decide(lambda: pool.poll(0.1))

    Args:
        size: ranks in a group, which are neighbours; all processes of the run build theirs together.
    """

    def __init__(self, size: int = 1) -> None:
        self._group = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None

    @property
    def is_this(self) -> bool:
        """Whether this process decides; the others need nothing that only `function` uses."""
        return self._group is None or dist.get_rank(self._group) == 0

    def decide(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank and return its result on all of them; it is sent pickled.

        Raises:
            Exception: the function's error, on all ranks: RuntimeError with its class and message on the others.
        """
        if self._group is None:
            return function()
        answer: list[Any] = [None, None]
        error: Exception | None = None
        if self.is_this:
            try:
                answer[0] = function()
            except Exception as raised:
                error, answer[1] = raised, f"{type(raised).__name__}: {raised}"
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        if error is not None:
            raise error
        if answer[1] is not None:
            raise RuntimeError(f"on the first rank of the group: {answer[1]}")
        return cast(T, answer[0])
