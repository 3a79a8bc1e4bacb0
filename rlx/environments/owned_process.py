"""One environment process as its owner sees it: what it was asked and has not answered, and how it ended."""

import contextlib
import json
import math
import os
import selectors
import socket
import tempfile
import time
from dataclasses import asdict
from typing import Any, BinaryIO

from rlx.environments.answers import decode
from rlx.environments.protocol import Failure, Observation, Reset
from rlx.environments.spec import EnvironmentSpec
from rlx.errors import cause_of
from rlx.processes.lines import BadAnswer, Lines
from rlx.processes.parent import LOAD_LIMIT_S, ChildProcess
from rlx.user_code import UserCodeError

ANSWER_SLACK_S = 5.0
"""A process answers at most this long after a call's limit, also on a busy machine [s]."""
WRITE_BYTES = 1 << 15
"""Requests wait for each other up to this size, until the answers are polled."""
NOTE_BYTES = 8
MEMORY_KEY = "environment.memory_limit_gb"

Answer = Reset | Observation | Failure


class EnvironmentProcess:
    """One environment process.

    Attributes:
        lives: numbers of the conversations that live here.
        expected: "reset" or "step" by number, for requests without an answer.
        unsent: lines that wait for `flush`.
        loaded: whether the environment's code is there.
        retiring: whether it gets no further conversations, because it ran out of memory once.
        at_work: after its end, the number of the conversation whose code ran then; 0: of none.
    """

    def __init__(self, spec: EnvironmentSpec, memory_bytes: int):
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)  # nothing that a process does holds the sampler
        self._note = _note_file()  # holds the number of the conversation whose code is at work
        with theirs:
            shared = (self._note.fileno(),)
            self._child = ChildProcess(
                "rlx.environments.process", theirs.fileno(), (memory_bytes, *shared), MEMORY_KEY, shared
            )
        self._lines, self.unsent = Lines(self.connection.fileno()), bytearray()
        self._limit_s = spec.limit_s + ANSWER_SLACK_S
        self.loaded, self._heard = False, time.monotonic()
        self.lives: set[int] = set()
        self.expected: dict[int, str] = {}
        self.retiring = False
        self.at_work = 0
        self.send(json.dumps(asdict(spec)))

    @property
    def deadline(self) -> float:
        """The time at which it has been silent for too long."""
        if not self.loaded:
            return self._heard + LOAD_LIMIT_S
        return self._heard + self._limit_s if self.expected else math.inf

    @property
    def wants(self) -> int:
        """The events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)

    def ask(self, number: int, kind: str, line: str) -> None:
        """Send a request that gets an answer."""
        if self.loaded and not self.expected:
            self._heard = time.monotonic()
        self.lives.add(number)
        self.expected[number] = kind
        self.send(line)

    def send(self, line: str) -> None:
        """Write a line, at the latest with the next `flush`: one write for many lines costs as much as one for each."""
        self.unsent += line.encode() + b"\n"
        if len(self.unsent) > WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits, or as much of it as the process takes now."""
        # The next `receive` raises if the process has ended
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self.unsent:
                sent = self.connection.send(self.unsent)
                del self.unsent[:sent]
                self._heard = time.monotonic()  # it reads, so it lives

    def receive(self) -> list[tuple[int, Answer]]:
        """Return the answers that are there. Call it if there is something to read.

        Raises:
            EOFError, OSError: it has ended, or what it sent is no answer.
            UserCodeError: the environment cannot be loaded.
        """
        records = self._lines.read()
        self._heard = time.monotonic()
        answers = []
        for record in records:
            if not self.loaded:
                self._take_greeting(record)
                continue
            number, answer = decode(record, self.expected)
            del self.expected[number]
            if isinstance(answer, Failure):
                self.lives.discard(number)
                self.retiring |= answer.kind == "memory"
            answers.append((number, answer))
        return answers

    def _take_greeting(self, record: Any) -> None:
        match record:
            case [None, str()]:
                self.loaded = True
            case [str(fault), str(trace)]:
                raise UserCodeError(fault) from cause_of(trace)
            case _:
                raise BadAnswer("sent a wrong answer to its specification")

    def let_go(self) -> None:
        """Tell it that no more requests come."""
        self.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def end(self, patience_s: float = 0.0) -> str:
        """Kill it after this time; return in words how it ended if it had ended before."""
        if patience_s > 0:
            self._child.wait(patience_s)
        how = self._child.end()
        self.connection.close()
        self._note.seek(0)
        self.at_work = int.from_bytes(self._note.read(NOTE_BYTES), "little")
        self._note.close()
        return how


def _note_file() -> BinaryIO:
    """Return a file in memory, or else a temporary one; so a full disk does not matter on Linux."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("rlx-note"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
