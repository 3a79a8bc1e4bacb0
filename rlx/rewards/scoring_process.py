"""A scoring process: calls reward functions. `rlx.rewards.scoring_pool` starts it, by `rlx.processes`.

Besides ["load", …] it gets ["call", number of the function, numbers of the calls, samples of each, pickled arguments]. It replies
[number, *Outcome] to each call.
"""

import asyncio
import base64
import math
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from rlx.processes.calls import TooLong, at_work, is_async, limited, loaded, number_at_work, unwrapped
from rlx.processes.child import OUT_OF_MEMORY
from rlx.processes.lines import Lines, line_of, send
from rlx.rewards.function import Function, Outcome, outcome_of, raised

FLUSH_S = 0.01
"""Outcomes wait at most this long to be sent together with others, unless the next call takes longer [s]."""


def serve(descriptor: int, at_once: int) -> None:
    """Handle requests until the driver closes the connection; `at_once` calls of an async function run concurrently."""
    functions: dict[int, tuple[Function, Callable[..., Any]]] = {}
    lines = Lines(descriptor, math.inf)
    # One event loop for all calls, because a function may keep objects that belong to a loop, such as a session.
    with asyncio.Runner() as runner:
        while True:
            try:
                messages = lines.read()
            except EOFError:
                return
            for kind, number, *request in messages:
                if kind == "load":
                    spec, function, reply = loaded(number, *request)
                    if function is not None:
                        functions[number] = spec, function
                    send(descriptor, line_of(reply))
                elif number in functions:
                    _Calls(descriptor, *functions[number], *request).run(runner, at_once)


class _Calls:
    """Calls of one function that came in one message."""

    def __init__(
        self,
        descriptor: int,
        spec: Function,
        function: Callable[..., Any],
        numbers: list[int],
        samples: list[int],
        content: str,
    ):
        self._descriptor, self._spec, self._function = descriptor, spec, function
        self._waiting, self._sent = bytearray(), time.monotonic()
        self._calls: list[tuple[int, int, dict[str, Any]]] = []
        try:
            arguments = pickle.loads(base64.b64decode(content))
            self._calls += zip(numbers, samples, arguments, strict=True)
        except Exception as fault:  # for example an object whose class this process cannot import
            for number in numbers:
                self._add(number, _failed(fault))

    def run(self, runner: asyncio.Runner, at_once: int) -> None:
        """Make the calls and send their outcomes."""
        if is_async(self._function):
            runner.run(self._all(at_once))
        else:
            for call in self._calls:
                self._one(*call)
        self._flush()

    def _one(self, number: int, samples: int, arguments: dict[str, Any]) -> None:
        number_at_work.set(number)
        try:
            with at_work(self._spec.cpu_limit_s):
                result = self._function(**arguments, **self._spec.options)
                outcome = outcome_of(self._spec, result, samples)
        except BaseException as fault:  # includes sys.exit()
            outcome = _failed(fault)
        self._add(number, outcome)

    async def _all(self, at_once: int) -> None:
        room = asyncio.Semaphore(at_once)

        async def one(number: int, samples: int, arguments: dict[str, Any]) -> None:
            number_at_work.set(number)
            async with room:
                try:
                    named = arguments | self._spec.options
                    result = await limited(self._spec.limit_s, False, self._function, **named)
                    outcome = outcome_of(self._spec, result, samples)
                except BaseException as fault:
                    outcome = _failed(fault)
            self._add(number, outcome)

        await asyncio.gather(*(one(*call) for call in self._calls))

    def _add(self, number: int, outcome: Outcome) -> None:
        self._waiting += line_of([number, *outcome])
        if time.monotonic() - self._sent > FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        send(self._descriptor, self._waiting)
        self._waiting, self._sent = bytearray(), time.monotonic()


def _failed(fault: BaseException) -> Outcome:
    """Return the outcome of a call that raised; end the process if memory ran out."""
    if isinstance(fault, MemoryError):
        os._exit(OUT_OF_MEMORY)
    return Outcome([], "timeout") if isinstance(fault, TooLong) else raised(unwrapped(fault), callers=(__file__,))
