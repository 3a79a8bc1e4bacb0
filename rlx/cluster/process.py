"""The process of a worker. It imports no torch, so that the environment is set before torch starts."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from rlx.cluster.errors import RankFault, WorkerLocation, fault_of
from rlx.cluster.hang import Standing, standing_of
from rlx.heartbeat import beat, beats

WATCH = "watch"
"""Ray's concurrency group of `standing`. Each group has a thread of its own; all other methods share another one."""


@dataclass(frozen=True)
class WorkerReply:
    """The result of a call on a worker.

    Args:
        value: the method's result; None from ranks that need not answer.
        fault: the reason if there is no result.
        log: (level, logger, text) of rlx's log records during the call.
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
        """Keep one record."""
        self.records.append((record.levelno, record.name, record.getMessage()))

    def take(self) -> tuple[tuple[int, str, str], ...]:
        """Return the records since the last call."""
        taken, self.records = tuple(self.records), []
        return taken


class WorkerProcess:
    """Ray actor that sets up a process, builds a worker in it and passes calls on to it.

    It returns exceptions as values, so that they need not be picklable and Ray adds no traceback of its own.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker: Any = None
        self._working: int | None = None  # the thread of the call that runs
        self._reserved: socket.socket | None = None
        self._log = _Collector()
        logger = logging.getLogger("rlx")
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)

    def location(self) -> WorkerLocation:
        """Return the node and process of this worker."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        interfaces = [
            name for name, cards in psutil.net_if_addrs().items() if any(card.address == address for card in cards)
        ]
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or next(iter(interfaces), None)
        log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else None
        return WorkerLocation(self._rank, context.get_node_id(), address, os.getpid(), interface, log)

    def reserve_port(self) -> int:
        """Reserve a free port without listening on it, so that the process group's store can bind it."""
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return int(self._reserved.getsockname()[1])

    def prepare(self, environment: dict[str, str]) -> None:
        """Set environment variables."""
        os.environ.update(environment)

    def build(self, worker_class: type, arguments: tuple[Any, ...]) -> WorkerReply:
        """Build the worker."""

        def make() -> None:
            self._worker = worker_class(*arguments)

        return self._guarded(make)

    def call(self, role: str, method: str, answers: bool, *arguments: Any) -> WorkerReply:
        """Run `worker.call(role, method, *arguments)`; send its result only if this rank `answers`."""

        def work() -> Any:
            result = self._worker.call(role, method, *arguments)
            return result if answers else None

        return self._guarded(work)

    @ray.method(concurrency_group=WATCH)
    def standing(self) -> Standing:
        """Return where the call that runs stands, also when it is stuck."""
        return standing_of(self._working, beats())

    def _guarded(self, work: Callable[[], Any]) -> WorkerReply:
        beat()
        self._working = threading.get_ident()
        try:
            value, fault = work(), None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            value, fault = None, fault_of(self._rank, error)
        finally:
            self._working = None
        return WorkerReply(value, fault, self._log.take())
