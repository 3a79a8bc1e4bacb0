"""An environment process: many conversations live in it. `rlx.environments.owned_process` starts it.

It receives lines of JSON: first the spec, then [number, "reset", row], [number, "step", turn] or [number, "end"]. It answers the
spec with [error or null, traceback], and each reset and step with a line of `rlx.environments.answers`.
"""

import asyncio
import inspect
import json
import os
import socket
import sys
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlx.environments.answers import LONGEST_TRACEBACK, Nonsense, checked_observation, checked_reset, encode
from rlx.environments.protocol import Environment, Failure, Observation, Reset, Turn
from rlx.environments.spec import EnvironmentSpec, Factory
from rlx.processes import child
from rlx.processes.child import OUT_OF_MEMORY, TooLong, end_with, interrupted_after, limit_memory
from rlx.processes.faults import own_traceback
from rlx.processes.lines import LONGEST_LINE
from rlx.user_code import IMPORTING, UserCodeError, line_in

CALLERS = (__file__, child.__file__)
"""Their frames are not in the tracebacks of environments."""
_number: ContextVar[int] = ContextVar("_number", default=0)
"""Number of the conversation that a task works for; 0: of none."""
_note = -1  # descriptor of the file in which the owner reads whose code was at work when this process ended


@contextmanager
def _at_work(limit_s: float) -> Iterator[None]:
    """Note whose code runs, and raise TooLong if it runs for longer."""
    _write(_number.get())
    try:
        with interrupted_after(limit_s, waiting_counts=True):
            yield
    finally:
        _write(0)


def _write(number: int) -> None:
    if _note >= 0:
        with suppress(OSError):  # without a note nobody is at fault, as on a full disk
            os.pwrite(_note, number.to_bytes(8, "little"), 0)


class Raised(Exception):
    """Its cause takes another way than SystemExit and the like, which would end the event loop."""


@types.coroutine
def _interrupted(coroutine: Coroutine[Any, Any, Any], limit_s: float) -> Generator[Any, Any, Any]:
    """Await a coroutine, and raise TooLong in it where it computes for longer without waiting."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        with _at_work(limit_s):
            try:
                waits_for = resume(value)
            except StopIteration as end:
                return end.value
            except (KeyboardInterrupt, SystemExit) as fault:
                raise Raised from fault
        try:
            value = yield waits_for
            resume = coroutine.send
        except BaseException as fault:
            resume, value = coroutine.throw, fault


async def _awaited(waiting: Awaitable[Any]) -> Any:
    return await waiting


async def limited(limit_s: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, async or not. Raises TooLong after this time, also where the call swallows its cancellation."""
    with _at_work(limit_s):
        result = call(*arguments)
    if not inspect.isawaitable(result):
        return result
    coroutine = result if inspect.iscoroutine(result) else _awaited(result)
    task = asyncio.ensure_future(_interrupted(coroutine, limit_s))
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    if not done:
        task.cancel()
        raise TooLong
    return task.result()


class EnvironmentServer:
    """Handles the worker's requests.

    Args:
        writer: to the worker.
        spec: of the environments.
        make: makes one.
    """

    def __init__(self, writer: asyncio.StreamWriter, spec: EnvironmentSpec, make: Factory):
        self._writer, self._limit_s, self._make = writer, spec.limit_s, make
        self._path = spec.path
        self._environments: dict[int, Environment] = {}

    async def answer(self, number: int, kind: str, content: Any) -> None:
        """Handle one request and write its answer at once."""
        _number.set(number)
        if kind == "end":
            await self._end(number)
            return
        try:
            line = encode(
                number, await (self._reset(number, content) if kind == "reset" else self._step(number, content))
            )
        except BaseException as fault:
            self._writer.write(encode(number, self._failure(fault)))  # before `close`, which may take long
            await self._end(number)
            return
        self._writer.write(line)

    async def close(self) -> None:
        """Close what lives here."""
        for number in list(self._environments):
            await self._end(number)

    async def _reset(self, number: int, row: dict[str, Any]) -> Reset:
        until = time.monotonic() + self._limit_s  # for both: the worker waits no longer
        environment = await limited(self._limit_s, self._make)
        self._environments[number] = environment
        messages = await limited(max(until - time.monotonic(), 0.01), environment.reset, row)
        return checked_reset(messages, list(getattr(environment, "tools", None) or []))

    async def _step(self, number: int, turn: list[Any]) -> Observation:
        return checked_observation(await limited(self._limit_s, self._environments[number].step, Turn(*turn)))

    def _failure(self, fault: BaseException) -> Failure:
        if isinstance(fault, Nonsense):  # raised by rlx, and its text says all
            return Failure(str(fault), "nonsense")
        if isinstance(fault, Raised) and fault.__cause__ is not None:
            fault = fault.__cause__
        trace = own_traceback(fault, CALLERS, LONGEST_TRACEBACK)
        match fault:
            case TooLong():
                return Failure(f"took longer than {self._limit_s:g} s", "timeout", trace)
            case MemoryError():
                return Failure("ran out of memory", "memory", trace)
        return Failure(f"raised {type(fault).__name__}{self._place(fault)}: {fault}", "error", trace)

    def _place(self, fault: BaseException) -> str:
        """Return where in the user's file an error was raised, for a message."""
        line = line_in(self._path, fault) if self._path else None
        return f" ({Path(self._path).name}:{line})" if self._path and line else ""

    async def _end(self, number: int) -> None:
        close = getattr(self._environments.pop(number, None), "close", None)
        if close is not None:
            try:
                await limited(self._limit_s, close)
            except BaseException as fault:  # the conversation has its answer
                traceback.print_exception(fault)


async def serve(connection: socket.socket) -> None:
    """Handle requests until the worker closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    spec = EnvironmentSpec(**json.loads(await reader.readline()))
    fault = trace = None
    try:
        make = spec.load()
    except UserCodeError as error:
        fault = str(error)
        trace = own_traceback(error.__cause__, IMPORTING, LONGEST_TRACEBACK) if error.__cause__ else ""
    writer.write(json.dumps([fault, trace or ""]).encode() + b"\n")
    if fault is not None:
        await reader.read()
        return
    process, running = EnvironmentServer(writer, spec, make), set()
    while line := await reader.readline():
        task = asyncio.ensure_future(process.answer(*json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await process.close()


def main() -> None:
    """Run with the arguments: descriptor of the connection, the worker's process id, bytes of memory (0: any), the note's descriptor."""
    global _note  # set once, before any code of an environment runs
    descriptor, parent, memory_bytes, _note = map(int, sys.argv[1:])
    end_with(parent)
    limit_memory(memory_bytes)
    try:
        asyncio.run(serve(socket.socket(fileno=descriptor)))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except ConnectionError:  # the worker has ended the pool
        pass
    os._exit(0)  # even if environments have left threads running


if __name__ == "__main__":
    main()
