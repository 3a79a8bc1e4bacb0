"""A reward process: calls reward functions, ends with the driver. Started by `rlx.rewards.pool`.

Messages from the driver: (number, Function) to load one, or what else is Loadable, answered by (is it async, UserCodeError or None, traceback); and
(number, samples of each call, pickled arguments of the calls), answered by lists of (place of the call, Outcome).
"""

import asyncio
import ctypes
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rlx.rewards.function import Function, Outcome, is_async, outcome_of, raised
from rlx.user_code import UserCodeError

FLUSH_S = 0.01
"""Answers wait at most so long for others to travel with them, unless the next call takes longer."""
OUT_OF_MEMORY = 97
"""Exit code after a MemoryError: what the function has left behind goes with the process."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Has the system kill this process when the driver's thread that started it ends, also inside C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(0)


class Answers:
    """Collects outcomes and sends them, some at a time."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._waiting: list[tuple[int, Outcome]] = []
        self._sent = time.monotonic()

    def add(self, place: int, outcome: Outcome) -> None:
        """The outcome of the call at this place."""
        self._waiting.append((place, outcome))
        if time.monotonic() - self._sent > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Sends what waits."""
        if self._waiting:
            self._connection.send(self._waiting)
        self._waiting, self._sent = [], time.monotonic()


def failed(fault: BaseException) -> Outcome:
    """The outcome of a call that raised; without memory the process ends."""
    if isinstance(fault, MemoryError):
        os._exit(OUT_OF_MEMORY)
    return raised(fault)


async def call_all(
    spec: Function,
    function: Callable[..., Any],
    calls: list[dict[str, Any]],
    samples: list[int],
    at_once: int,
    to: Answers,
) -> None:
    """Calls an async function on all of these, at most `at_once` at a time."""
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
    """What the driver asks of this process.

    Args:
        connection: to the driver.
        at_once: calls of an async function that may run at a time.
    """

    def __init__(self, connection: Connection, at_once: int):
        self._connection, self._at_once = connection, at_once
        self._functions: dict[int, tuple[Function, Callable[..., Any]]] = {}

    def serve(self) -> None:
        """Answers until the driver closes the connection."""
        # One event loop for all calls: what a function keeps between them, such as a session, belongs to its loop.
        with asyncio.Runner() as runner:
            while True:
                try:
                    number, *request = self._connection.recv()
                except (EOFError, ConnectionResetError):
                    return
                if number in self._functions:
                    self._call(number, *request, runner)
                else:
                    self._connection.send(self._load(number, *request))

    def _load(self, number: int, spec: Function) -> tuple[bool, UserCodeError | None, str]:
        try:
            function = spec.load()
        except UserCodeError as fault:
            cause = fault.__cause__
            return False, type(fault)(str(fault)), "".join(traceback.format_exception(cause)) if cause else ""
        self._functions[number] = spec, function
        return is_async(function), None, ""

    def _call(self, number: int, samples: list[int], payload: bytes, runner: asyncio.Runner) -> None:
        spec, function = self._functions[number]
        answers = Answers(self._connection)
        try:
            calls = pickle.loads(payload)
        except Exception as fault:  # an object whose class this process cannot import
            for place in range(len(samples)):
                answers.add(place, failed(fault))
            calls = []
        if is_async(function):
            runner.run(call_all(spec, function, calls, samples, self._at_once, answers))
        else:
            for place, arguments in enumerate(calls):
                try:
                    outcome = outcome_of(spec, function(**arguments, **spec.options), samples[place])
                except BaseException as fault:  # sys.exit() too
                    outcome = failed(fault)
                answers.add(place, outcome)
        answers.flush()


def main() -> None:
    """Takes as arguments the connection's descriptor, the driver's process id, bytes of memory (0: any), calls at once."""
    descriptor, parent, memory_bytes, at_once = map(int, sys.argv[1:])
    end_with(parent)
    if memory_bytes:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    Process(Connection(descriptor), at_once).serve()
    os._exit(0)  # whatever threads the functions have left running


if __name__ == "__main__":
    main()
