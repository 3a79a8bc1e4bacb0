"""Agents in processes, and the process that serves the policy's address to them.

An agent's whole run is one step of its environment, so its process is restarted and blamed as any other environment's. A restart
begins a new life of the sample: the turns of the old one are forgotten.
"""

import hashlib
import hmac
import itertools
import json
import math
import secrets
import socket
import time
from typing import Any, NamedTuple

from rlx.environments.environment_pool import SLACK_S, EnvironmentPool, PooledConversation
from rlx.environments.protocol import Failure, Observation, Reset, Turn
from rlx.environments.spec import EnvironmentSpec
from rlx.processes.pool import IsolatedProcess, Lost, WorkerPool

LOOPBACK, OTHER_ADDRESS = "127.0.0.1", "192.0.2.1"  # the second is no machine's
TICK_S = 1.0
"""From one look for agents that make no call to the next [s]."""


def token_of(secret: str, life: int) -> str:
    """Return the token of a life: its number, signed."""
    return f"rlx-{life}-{hmac.new(secret.encode(), str(life).encode(), hashlib.sha256).hexdigest()}"


def node_address() -> str:
    """Return the address that this machine has for others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((OTHER_ADDRESS, 9))  # sends nothing, but chooses a route
        return str(probe.getsockname()[0])


class Asked(NamedTuple):
    """An agent's call, as `endpoint_server` sends it."""

    number: int
    content: dict[str, Any]


class Cancelled(NamedTuple):
    """The agent no longer waits for the answer to this call."""

    number: int


class Restarted(NamedTuple):
    """The agent begins again; all that it asked before is void."""


class Finished(NamedTuple):
    """The agent has ended."""

    answer: Observation | Failure
    read: frozenset[int]  # calls whose answers it has read


Event = Asked | Cancelled | Restarted | Finished


class AgentPool(EnvironmentPool):
    """Samples' agents; `poll` returns their `Event`s by key. For the last argument see `rlx.environments.openai_calls.History`."""

    def __init__(self, spec: EnvironmentSpec, processes: int, memory_limit_gb: float | None, on_rewritten_history: str):
        super().__init__(spec, processes, memory_limit_gb)
        self._mode, self._secret, self._url = on_rewritten_history, secrets.token_hex(32), ""
        self._server: IsolatedProcess | None = None
        self._lives = itertools.count(1)
        self._life: dict[int, int] = {}  # by key
        self._key: dict[int, int] = {}  # by life
        self._calls: dict[int, set[int]] = {}  # in work, by key
        self._idle: dict[int, float] = {}  # since when an agent has no call in work, by key
        self._ended: dict[int, Observation | Failure] = {}  # answers whose life the server has not closed

    def reset(self, key: int, row: dict[str, Any]) -> None:
        """Start a sample's agent; return at once."""
        if self._server is None:  # here, because it ends with the thread that starts it
            own = WorkerPool("rlx.environments.endpoint_server", None, "", math.inf, lambda message, _: (0, message))
            self._server = IsolatedProcess(own)
            self.workers.add(self._server)
            self._retiring.add(self._server)  # it takes no conversations
            host = LOOPBACK if self._spec.address == "loopback" else node_address()
            self._server.send(["start", host, self._secret, self._mode, self._spec.tool_format])
        while not self._url:
            self._ready += super().poll(TICK_S)
        super().reset(key, row)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Any]]:
        """Return the events that are there by key; wait for the first one at most this long. Raises UserCodeError."""
        until, events = time.monotonic() + timeout_s, []
        while True:
            for key, found in super().poll(min(TICK_S, max(0.0, until - time.monotonic()))):
                if isinstance(found, Reset):
                    self._idle[key] = time.monotonic()
                elif not isinstance(found, Observation | Failure):
                    events.append((key, found))
                elif key in self._life:
                    self._ended[key] = found
                    self._idle.pop(key, None)
                    self._close_life(key)
                else:  # its row cannot be sent
                    events.append((key, Finished(found, frozenset())))
            self._fail_idle()
            if events or time.monotonic() >= until:
                self.flush()
                return events

    def reply(self, key: int, kind: str, number: int, *content: Any) -> None:
        """Send the answer to a call, or why it is rejected; see `endpoint_server`."""
        self._leave(key, number)
        assert self._server is not None, "calls come from it"
        self._server.send([kind, number, *content])

    def end(self, key: int) -> None:
        """Forget a sample; its agent is interrupted."""
        super().end(key)
        self._close_life(key)
        self._key.pop(self._life.pop(key, 0), None)
        self._calls.pop(key, None)
        self._idle.pop(key, None)
        self._ended.pop(key, None)

    def _leave(self, key: int, number: int) -> None:
        self._calls[key].discard(number)
        if not self._calls[key]:
            self._idle[key] = time.monotonic()

    def _begin(self, own: PooledConversation) -> None:
        """Start an agent, or start it again, with a life of its own."""
        if own.key in self._life:
            self._close_life(own.key)
            del self._key[self._life[own.key]]
            self._ready = [each for each in self._ready if each[0] != own.key]
            self._ready.append((own.key, Restarted()))  # type: ignore[arg-type]
        life = self._life[own.key] = next(self._lives)
        self._key[life], self._calls[own.key] = own.key, set()
        self._idle.pop(own.key, None)
        row = json.loads(own.lines[0])[2] | {"endpoint": [self._url, token_of(self._secret, life)]}
        step = ["step", own.number, list(Turn("", 0))]
        own.lines, own.answers = [json.dumps(["reset", own.number, row]), json.dumps(step)], []
        super()._begin(own)

    def _close_life(self, key: int) -> None:
        if self._server is not None and key in self._life:
            self._server.send(["close", self._life[key], min(self._key)])

    def _take(self, worker: IsolatedProcess, own: Any, what: Any) -> None:
        if worker is not self._server:
            super()._take(worker, own, what)
            return
        if isinstance(what, Lost):
            self._server = None
            self.close()
            raise RuntimeError(f"the process that serves the address {what.how}; see its output above")
        kind, number, *content = what
        if kind == "address":
            self._url = number
        elif (key := self._key.get(content[0])) is None:  # a life that has been closed
            pass
        elif kind == "call":
            self._calls[key].add(number)
            self._idle.pop(key, None)
            self._ready.append((key, Asked(number, content[1])))  # type: ignore[arg-type]
        elif kind == "cancel" and number in self._calls[key]:
            self._leave(key, number)
            self._ready.append((key, Cancelled(number)))  # type: ignore[arg-type]
        elif kind == "closed" and key in self._ended:
            self._ready.append((key, Finished(self._ended.pop(key), frozenset(content[1]))))  # type: ignore[arg-type]

    def _fail_idle(self) -> None:
        """Fail agents that neither call nor end for too long; one that computes is interrupted in its process before."""
        until = time.monotonic() - self._spec.limit_s - SLACK_S
        for key in [key for key, since in self._idle.items() if since < until]:
            del self._idle[key]
            own = self._of_key[key]
            if not own.has_failed:
                reason = f"neither called the model nor ended for {self._spec.limit_s:g} s"
                self._finish(own, Failure(reason, "timeout"))
