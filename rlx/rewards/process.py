"""A reward process: calls reward functions and ends with the driver. `rlx.rewards.pool` starts it.

The driver sends (number, Loadable) to load a function; the answer is [is it async, error or null, traceback]. It sends (number,
samples of each call, pickled arguments of the calls) to call it; the answers are lists of [index of the call, *Outcome].
`rlx.rewards.answers` has their form.
"""

import asyncio
import os
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rlx.processes.child import OUT_OF_MEMORY, TooLong, end_with, interrupted_after, limit_memory
from rlx.processes.faults import own_traceback
from rlx.processes.lines import send
from rlx.rewards.answers import Loaded, of_loaded
from rlx.rewards.function import LONGEST_TEXT, Function, Outcome, is_async, outcome_of, raised
from rlx.user_code import IMPORTING, UserCodeError

FLUSH_S = 0.01
"""Outcomes wait at most this long to be sent together with others, unless the next call takes longer [s]."""


class Answers:
    """Collects outcomes and sends several at a time."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._waiting: list[tuple[Any, ...]] = []
        self._sent = time.monotonic()

    def add(self, place: int, outcome: Outcome) -> None:
        """Add the outcome of the call at this index."""
        self._waiting.append((place, *outcome))
        if time.monotonic() - self._sent > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send the collected outcomes."""
        if self._waiting:
            send(self._descriptor, self._waiting)
        self._waiting, self._sent = [], time.monotonic()


def failed(fault: BaseException) -> Outcome:
    """Return the outcome of a call that raised; end the process if memory ran out."""
    if isinstance(fault, MemoryError):
        os._exit(OUT_OF_MEMORY)
    return raised(fault, callers=(__file__,))


async def call_all(
    spec: Function,
    function: Callable[..., Any],
    calls: list[dict[str, Any]],
    samples: list[int],
    at_once: int,
    to: Answers,
) -> None:
    """Call an async function with all of these arguments, at most `at_once` calls concurrently."""
    room = asyncio.Semaphore(at_once)

    async def one(place: int, arguments: dict[str, Any]) -> None:
        async with room:
            try:
                async with asyncio.timeout(spec.limit_s) as limit:
                    outcome = outcome_of(spec, await function(**arguments, **spec.options), samples[place])
            except BaseException as fault:
                outcome = Outcome([], "timeout") if limit.expired() else failed(fault)
            to.add(place, outcome)

    await asyncio.gather(*(one(place, arguments) for place, arguments in enumerate(calls)))


class Process:
    """Handles the driver's requests.

    Args:
        connection: to the driver.
        at_once: calls of an async function that may run concurrently.
    """

    def __init__(self, connection: Connection, at_once: int):
        self._connection, self._at_once = connection, at_once
        self._functions: dict[int, tuple[Function, Callable[..., Any]]] = {}

    def serve(self) -> None:
        """Handle requests until the driver closes the connection."""
        # One event loop for all calls, because a function may keep objects that belong to a loop, such as a session.
        with asyncio.Runner() as runner:
            while True:
                try:
                    number, *request = self._connection.recv()
                except (EOFError, ConnectionResetError):
                    return
                if number in self._functions:
                    self._call(number, *request, runner)
                else:
                    send(self._connection.fileno(), of_loaded(self._load(number, *request)))

    def _load(self, number: int, spec: Function) -> Loaded:
        try:
            function = spec.load()
        except UserCodeError as fault:
            return False, fault, own_traceback(fault.__cause__, IMPORTING, LONGEST_TEXT) if fault.__cause__ else ""
        self._functions[number] = spec, function
        return is_async(function), None, ""

    def _call(self, number: int, samples: list[int], payload: bytes, runner: asyncio.Runner) -> None:
        spec, function = self._functions[number]
        answers = Answers(self._connection.fileno())
        try:
            calls = pickle.loads(payload)
        except Exception as fault:  # for example an object whose class this process cannot import
            for place in range(len(samples)):
                answers.add(place, failed(fault))
            calls = []
        if is_async(function):
            runner.run(call_all(spec, function, calls, samples, self._at_once, answers))
        else:
            for place, arguments in enumerate(calls):
                try:
                    with interrupted_after(spec.cpu_limit_s):
                        result = function(**arguments, **spec.options)
                    outcome = outcome_of(spec, result, samples[place])
                except TooLong:
                    outcome = Outcome([], "timeout")
                except BaseException as fault:  # includes sys.exit()
                    outcome = failed(fault)
                answers.add(place, outcome)
        answers.flush()


def main() -> None:
    """Run with the arguments: descriptor of the connection, the driver's process id, bytes of memory (0: any), calls at once."""
    descriptor, parent, memory_bytes, at_once = map(int, sys.argv[1:])
    end_with(parent)
    limit_memory(memory_bytes)
    Process(Connection(descriptor), at_once).serve()
    os._exit(0)  # even if functions have left threads running


if __name__ == "__main__":
    main()
