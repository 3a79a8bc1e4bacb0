"""The process that a worker lives in. Imports no torch, so that the environment is set before torch starts."""

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from rlx.cluster.errors import Place, RankFault, fault_of


@dataclass(frozen=True)
class Answer:
    """What a worker sends back.

    Args:
        value: the method's result; None from ranks that need not answer.
        fault: why there is none.
        log: (level, logger, text) of what rlx logged meanwhile.
    """

    value: Any
    fault: RankFault | None
    log: tuple[tuple[int, str, str], ...]


class _Collector(logging.Handler):
    """Keeps rlx's log records until the next answer takes them to the driver."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one record."""
        self.records.append((record.levelno, record.name, record.getMessage()))

    def take(self) -> tuple[tuple[int, str, str], ...]:
        """The records since the last call."""
        taken, self.records = tuple(self.records), []
        return taken


class WorkerProcess:
    """Ray actor that sets up a process, builds a worker in it and passes calls on.

    An exception comes back as a value: it need not be picklable, and Ray's own traceback stays out of the way.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker: Any = None
        self._reserved: socket.socket | None = None
        self._log = _Collector()
        logger = logging.getLogger("rlx")
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)

    def place(self) -> Place:
        """Where this process runs."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        interfaces = [
            name for name, cards in psutil.net_if_addrs().items() if any(card.address == address for card in cards)
        ]
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or next(iter(interfaces), None)
        log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else None
        return Place(self._rank, context.get_node_id(), address, os.getpid(), interface, log)

    def reserve_port(self) -> int:
        """A free port, kept from others but not listened on, so that the process group's store can bind it."""
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return int(self._reserved.getsockname()[1])

    def prepare(self, environment: dict[str, str]) -> None:
        """Sets environment variables."""
        os.environ.update(environment)

    def build(self, worker_class: type, arguments: tuple[Any, ...]) -> Answer:
        """Makes the worker."""

        def make() -> None:
            self._worker = worker_class(*arguments)

        return self._guarded(make)

    def call(self, role: str, method: str, answers: bool, *arguments: Any) -> Answer:
        """`worker.call(role, method, *arguments)`; its result is sent only if this rank `answers`."""

        def work() -> Any:
            result = self._worker.call(role, method, *arguments)
            return result if answers else None

        return self._guarded(work)

    def _guarded(self, work: Callable[[], Any]) -> Answer:
        try:
            value, fault = work(), None
        except Exception as error:
            value, fault = None, fault_of(self._rank, error)
        return Answer(value, fault, self._log.take())
