"""A scoring process: calls reward functions. `rlx.rewards.scoring_pool` starts it, by `rlx.processes`.

Besides ["load", …] it gets ["call", number of the function, numbers of the calls, samples of each, pickled arguments]. It replies
[number, *Outcome] to each call.
"""

import asyncio
import base64
import json
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

from rlx.processes.calls import at_work, is_async, limited, loaded, number_at_work
from rlx.processes.child import OUT_OF_MEMORY
from rlx.processes.lines import line_of
from rlx.rewards.function import Function, Outcome, outcome_of, raised
from rlx.user_code import TooLong


def serve(connection: socket.socket, at_once: int) -> None:
    """Handle requests until the driver closes the connection; `at_once` calls of an async function run concurrently."""
    functions: dict[int, tuple[Function, Callable[..., Any]]] = {}
    # One event loop for all calls, because a function may keep objects that belong to a loop, such as a session.
    with connection.makefile("rb") as lines, asyncio.Runner() as runner:
        for line in lines:
            kind, number, *request = json.loads(line)
            if kind == "load":
                spec, function, reply = loaded(number, *request)
                if function is not None:
                    functions[number] = spec, function
                connection.sendall(line_of(reply))
            elif number in functions:
                calls = _Calls(connection, *functions[number])
                calls.run(runner, at_once, *request)


class _Calls:
    """Calls of one function that came in one message."""

    def __init__(self, connection: socket.socket, spec: Function, function: Callable[..., Any]):
        self._connection, self._spec, self._function = connection, spec, function

    def run(self, runner: asyncio.Runner, at_once: int, numbers: list[int], samples: list[int], content: str) -> None:
        """Make the calls and send their outcomes."""
        try:
            calls = list(zip(numbers, samples, pickle.loads(base64.b64decode(content)), strict=True))
        except Exception as fault:  # for example an object whose class this process cannot import
            for number in numbers:
                self._send(number, _failed(fault))
            return
        if is_async(self._function):
            runner.run(self._all(calls, asyncio.Semaphore(at_once)))
            return
        for number, count, arguments in calls:
            number_at_work.set(number)
            try:
                with at_work(self._spec.cpu_limit_s):
                    result = self._function(**arguments, **self._spec.options)
                    outcome = outcome_of(self._spec, result, count)
            except BaseException as fault:  # includes sys.exit()
                outcome = _failed(fault)
            self._send(number, outcome)

    async def _all(self, calls: list[tuple[int, int, dict[str, Any]]], room: asyncio.Semaphore) -> None:
        async def one(number: int, count: int, arguments: dict[str, Any]) -> None:
            number_at_work.set(number)
            async with room:
                try:
                    named = arguments | self._spec.options
                    result = await limited(self._spec.limit_s, 0.0, self._function, **named)
                    outcome = outcome_of(self._spec, result, count)
                except BaseException as fault:
                    outcome = _failed(fault)
            self._send(number, outcome)

        await asyncio.gather(*(one(*call) for call in calls))

    def _send(self, number: int, outcome: Outcome) -> None:
        self._connection.sendall(line_of([number, *outcome]))


def _failed(fault: BaseException) -> Outcome:
    """Return the outcome of a call that raised; end the process if memory ran out."""
    if isinstance(fault, MemoryError):
        os._exit(OUT_OF_MEMORY)
    return Outcome([], "timeout") if isinstance(fault, TooLong) else raised(fault, callers=(__file__,))
