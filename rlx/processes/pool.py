"""The owner's side: start isolated processes, talk to them without waiting for any of them, and notice how they end.

Note [what a process costs]: a process sends something within the limit of the calls it has, plus the pool's slack. If it is silent
for longer, it hangs in code that cannot be interrupted, and the owner kills it with all processes that it started. A process
notes the number of the request whose code is at work, so its end tells which request is to blame.
"""

import base64
import contextlib
import json
import math
import os
import pickle
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, Self

from rlx.errors import cause_of
from rlx.processes import child
from rlx.processes.lines import BadAnswer, Lines
from rlx.user_code import ImportFailed, UserCodeError

LOAD_LIMIT_S = 300.0  # to import a user's code
_ERRORS = {each.__name__: each for each in (UserCodeError, ImportFailed)}


class Loadable(Protocol):
    """An object that a process can load; the owner sends it pickled."""

    source: str  # path of the file to import, for messages

    def load(self) -> Callable[..., Any]:
        """Import it. Raises UserCodeError."""
        ...


class Loaded(NamedTuple):
    """A reply to `IsolatedProcess.load`."""

    is_async: bool
    fault: UserCodeError | None = None  # why the code cannot be loaded


class Lost(NamedTuple):
    """A process has ended, or hung and was ended."""

    kind: Literal["timeout", "memory", "crash"]
    how: str  # in words
    at_work: int  # number of the request whose code ran then; 0: none's
    fault: UserCodeError | None = None  # if it ended while it imported code


class IsolatedProcess:
    """One process."""

    def __init__(self, pool: "WorkerPool"):
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)  # nothing that a process does holds the owner
        self._note = _note_file()
        inherited = theirs.fileno(), self._note.fileno()
        arguments = pool.memory_bytes, pool.module, *pool.arguments
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # processes share the cores, so each uses one thread
        with theirs:
            self._process = child.start("rlx.processes.main", inherited, arguments, environment)
        self._lines = Lines(self.connection.fileno())
        self.unsent = bytearray()  # lines that wait for `flush`
        self._limit_s, self._heard = math.inf, time.monotonic()
        self._codes: dict[Loadable, int] = {}
        self._pool = pool
        self.open: dict[int, Any] = {}  # what was asked, by the numbers of requests without a reply
        self.loading: dict[int, Loadable] = {}  # code that is being imported, by its number
        self.guests: set[Any] = set()  # what the pool keeps in this process

    @property
    def deadline(self) -> float:
        """The time at which it has been silent for too long."""
        if self.loading:
            return self._heard + LOAD_LIMIT_S
        return self._heard + self._limit_s + self._pool.slack_s if self.open else math.inf

    def load(self, code: Loadable) -> int:
        """Request the import of code that is not there or on its way; return its number."""
        if code not in self._codes:
            number = self._codes[code] = len(self._codes) + 1
            self.send(["load", number, base64.b64encode(pickle.dumps(code)).decode()])
            self.loading[number] = code
        return self._codes[code]

    def ask(self, asked: Mapping[int, Any], request: str | list[Any], limit_s: float) -> None:
        """Send requests that get replies, in one line; each call has a limit."""
        self.send(request)
        self._limit_s = limit_s
        self.open |= asked

    def send(self, message: str | list[Any]) -> None:
        """Write a message, JSON or what becomes JSON, with the next `flush`."""
        if not self.loading and not self.open:
            self._heard = time.monotonic()
        self.unsent += (message if isinstance(message, str) else json.dumps(message)).encode() + b"\n"

    def flush(self) -> None:
        """Write what waits, or as much of it as the process takes now."""
        # It may not read now (BlockingIOError), or have ended: then `receive` raises
        with contextlib.suppress(OSError):
            while self.unsent:
                sent = self.connection.send(self.unsent)
                del self.unsent[:sent]
                self._heard = time.monotonic()  # it reads, so it lives

    def receive(self) -> Iterator[tuple[Any, Any]]:
        """Yield what was asked (None: to load code) and the reply, of each message that is there.

        Raises EOFError or OSError if it has ended, or BadAnswer.
        """
        messages = self._lines.read()
        self._heard = time.monotonic()
        for message in messages:
            match message:
                case ["loaded", int(number), bool(is_async), str(name), str(text), str(trace)] if (
                    number in self.loading
                ):
                    del self.loading[number]
                    fault = _ERRORS.get(name, UserCodeError)(text) if name else None
                    if fault is not None:
                        fault.__cause__ = cause_of(trace)
                    yield None, Loaded(is_async, fault)
                case ["alive"]:  # nothing but a sign of life
                    pass
                case _:
                    number, reply = self._pool.decode(message, self.open)
                    yield self.open.pop(number, None), reply

    def end(self, patience_s: float = 0.0) -> Lost:
        """Kill it after this time, with all processes that it started; return how it ended if it had ended before."""
        code = child.end(self._process, patience_s)
        self.connection.close()
        with self._note:
            self._note.seek(0)
            at_work = int.from_bytes(self._note.read(8), "little")
        if code == child.OUT_OF_MEMORY:
            return Lost("memory", f"ran out of memory ({self._pool.memory_key})", at_work)
        return Lost("crash", f"ended its process ({child.in_words(code)})", at_work)


class WorkerPool:
    """Processes that serve one kind of requests. They end with the thread that starts them, too, so one thread uses the pool.

    Args:
        module: its `serve` handles requests, see `rlx.processes.main`.
        memory_limit_gb: memory that each process may allocate [10^9 bytes]; None: no limit.
        memory_key: key of the configuration that limits memory, for messages.
        slack_s: a process replies at most this long after a call's limit, also on a busy machine.
        decode: returns number and content of a reply, given what was asked by number. Raises BadAnswer.
        arguments: further whole numbers for `serve`.
    """

    def __init__(
        self,
        module: str,
        memory_limit_gb: float | None,
        memory_key: str,
        slack_s: float,
        decode: Callable[[Any, dict[int, Any]], tuple[int, Any]],
        arguments: tuple[int, ...] = (),
    ):
        self.module, self.memory_bytes, self.memory_key = module, int((memory_limit_gb or 0) * 1e9), memory_key
        self.slack_s, self.arguments, self.decode = slack_s, arguments, decode
        self.workers: set[IsolatedProcess] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> IsolatedProcess:
        worker = IsolatedProcess(self)
        self.workers.add(worker)
        return worker

    def flush(self) -> None:
        """Write the requests that wait, so that processes work before the next `exchange`; return at once."""
        for worker in self.workers:
            worker.flush()

    def exchange(self, wait_s: float = math.inf) -> list[tuple[IsolatedProcess, Any, Any]]:
        """Write and read what can be; wait for the first message or a deadline at most this long.

        For each event return its process, what was asked, and the reply; or None, and `Loaded` or `Lost`.
        """
        self.flush()
        earliest = min((worker.deadline for worker in self.workers), default=math.inf) - time.monotonic()
        wait_s = max(0.0, min(wait_s, earliest))
        found: list[tuple[IsolatedProcess, Any, Any]] = []
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                writes = selectors.EVENT_WRITE if worker.unsent else 0
                selector.register(worker.connection, selectors.EVENT_READ | writes, worker)
            ready = selector.select(None if wait_s == math.inf else wait_s)
        for entry, event in ready:
            worker = entry.data
            if event & selectors.EVENT_WRITE:
                worker.flush()
            if event & selectors.EVENT_READ:
                try:
                    for asked, reply in worker.receive():
                        found.append((worker, asked, reply))
                except (EOFError, OSError) as fault:
                    found.append((worker, None, self._gone(worker, str(fault) if isinstance(fault, BadAnswer) else "")))
        for worker in [each for each in self.workers if time.monotonic() > each.deadline]:
            how = "hung in code that cannot be interrupted; its process was ended"
            found.append((worker, None, self._gone(worker, how, "timeout")))
        return found

    def _gone(self, worker: IsolatedProcess, how: str, kind: Literal["timeout", "crash"] = "crash") -> Lost:
        """End a process; `how`, in place of its own end, is why."""
        lost = self.stop(worker)
        if how:
            lost = Lost(kind, how, lost.at_work)
        if worker.loading:
            source = next(iter(worker.loading.values())).source
            how = f"takes longer than {LOAD_LIMIT_S:g} s" if kind == "timeout" else lost.how
            fault = UserCodeError(f"the import of {source} {how}; expected one that comes to its end")
            lost = lost._replace(fault=fault)
        return lost

    def stop(self, worker: IsolatedProcess, patience_s: float = 0.0) -> Lost:
        """End a process of the pool, see `IsolatedProcess.end`."""
        self.workers.remove(worker)
        return worker.end(patience_s)

    def close(self, patience_s: float = 0.0) -> None:
        """End all processes; those that hear of it in time end by themselves."""
        for worker in self.workers if patience_s else ():
            worker.flush()
            with contextlib.suppress(OSError):
                worker.connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + patience_s
        for worker in list(self.workers):
            self.stop(worker, until - time.monotonic())


def _note_file() -> BinaryIO:
    """Return a file in memory, or else a temporary one; so a full disk does not matter on Linux."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("rlx-note"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
