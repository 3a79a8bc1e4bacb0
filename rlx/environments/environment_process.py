"""An environment process: many conversations live in it. `rlx.environments.environment_pool` starts it, by `rlx.processes`.

Besides ["load", …] it gets ["reset", number of the conversation, row], ["step", number, turn] and ["end", number, null]. It replies to
each reset and step with a line of `rlx.environments.answers`.
"""

import asyncio
import json
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from rlx.environments.answers import LONGEST_TRACEBACK, Nonsense, checked_observation, checked_reset, encode
from rlx.environments.protocol import Environment, Failure, Observation, Reset, Turn
from rlx.environments.spec import EnvironmentSpec, Factory
from rlx.processes.calls import limited, loaded, number_at_work, own_traceback
from rlx.processes.lines import line_of
from rlx.user_code import TooLong, line_in

BEAT_S = 1.0
LONGEST_REQUEST = 2**40  # bytes; asyncio wants a limit, and the worker is trusted


def serve(connection: socket.socket) -> None:
    """Handle requests until the worker closes the connection."""
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_REQUEST)
    _, number, content = json.loads(await reader.readline())
    spec, make, reply = loaded(number, content)
    writer.write(line_of(reply))
    if make is None:
        await reader.read()
        return
    server = _Server(writer, spec, make)
    alive = asyncio.ensure_future(server.show_life()) if spec.has_agents else None
    while line := await reader.readline():
        server.take(*json.loads(line))
    if alive is not None:
        alive.cancel()
    for number in list(server.environments):
        await server.end(number)


class _Server:
    """The environments of a process by the numbers of their conversations; `make` makes one."""

    def __init__(self, writer: asyncio.StreamWriter, spec: EnvironmentSpec, make: Factory):
        self._writer, self._spec, self._make = writer, spec, make
        self.environments: dict[int, Environment] = {}
        self._running: dict[asyncio.Task[None], int] = {}

    def take(self, kind: str, number: int, content: Any) -> None:
        """Begin to handle a request."""
        task = asyncio.ensure_future(self.reply(kind, number, content))
        self._running[task] = number
        task.add_done_callback(self._running.pop)

    async def show_life(self) -> None:
        """Show that the event loop runs: an agent may be silent for as long as its samples take."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self.environments:
                self._writer.write(line_of(["alive"]))

    async def reply(self, kind: str, number: int, content: Any) -> None:
        """Handle one request and write its answer at once."""
        number_at_work.set(number)
        if kind == "end":
            await self.end(number)
            return
        try:
            answer = await (self._reset(number, content) if kind == "reset" else self._step(number, content))
            self._writer.write(encode(number, answer))
        except BaseException as fault:
            self._writer.write(encode(number, self._failure(fault)))  # before `close`, which may take long
            await self.end(number)

    async def end(self, number: int) -> None:
        """Close a conversation's environment; an agent is interrupted."""
        for task, owner in self._running.items() if self._spec.has_agents else ():
            if owner == number and task is not asyncio.current_task():
                task.cancel()
        close = getattr(self.environments.pop(number, None), "close", None)
        if close is not None:
            try:
                await limited(self._spec.limit_s, self._spec.limit_s, close)
            except BaseException as fault:  # the conversation has its answer
                traceback.print_exception(fault)

    async def _reset(self, number: int, row: dict[str, Any]) -> Reset:
        until = time.monotonic() + self._spec.limit_s  # for both: the worker waits no longer
        environment = self.environments[number] = await limited(self._spec.limit_s, self._spec.limit_s, self._make)
        left_s = max(until - time.monotonic(), 0.01)
        messages = await limited(left_s, left_s, environment.reset, row)
        return checked_reset(messages, list(getattr(environment, "tools", None) or []))

    async def _step(self, number: int, turn: list[Any]) -> Observation:
        step, limit_s = self.environments[number].step, self._spec.limit_s
        # An agent waits for the model most of the time: the pool knows when it does not
        wait_s = None if self._spec.has_agents else limit_s
        return checked_observation(await limited(wait_s, limit_s, step, Turn(*turn)))

    def _failure(self, fault: BaseException) -> Failure:
        if isinstance(fault, Nonsense):  # raised by rlx, and its text says all
            return Failure(str(fault), "nonsense")
        trace = own_traceback(fault, (__file__,), LONGEST_TRACEBACK)
        match fault:
            case TooLong():
                return Failure(f"took longer than {self._spec.limit_s:g} s", "timeout", trace)
            case MemoryError():
                return Failure("ran out of memory", "memory", trace)
        line = line_in(self._spec.path, fault) if self._spec.path else None
        where = f" ({Path(self._spec.path or '').name}:{line})" if line else ""
        return Failure(f"raised {type(fault).__name__}{where}: {fault}", "error", trace)
