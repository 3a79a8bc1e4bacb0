"""The process of a worker. It imports no torch, so that the environment is set before torch starts."""

import gc
import importlib
import logging
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from rlx.cluster import without_collection
from rlx.cluster.errors import RankFault, WorkerLocation, fault_of
from rlx.cluster.hang import Standing, standing_of
from rlx.heartbeat import beats

WATCH = "watch"
"""Ray's concurrency group of `standing`. Each group has a thread of its own; all other methods share another one."""

LOOPBACK = "127.0.0.1"


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
        assert self.lock is not None
        with self.lock:  # `emit` is called with it: a thread that writes a checkpoint logs too
            taken, self.records = tuple(self.records), []
        return taken


class WorkerProcess:
    """Ray actor that sets up a process, builds a worker in it and passes calls on to it.

    It returns exceptions as values, so that they need not be picklable and Ray adds no traceback of its own.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker_class: type | None = None
        self._worker: Any = None
        self._thread = 0  # of all calls but `standing`
        self._beats_before = 0  # the call that runs
        self._log = _Collector()
        logger = logging.getLogger("rlx")
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)

    def location(self) -> WorkerLocation:
        """Return the node and process of this worker; the first call."""
        self._thread = threading.get_ident()
        context = ray.get_runtime_context()
        log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else None
        return WorkerLocation(self._rank, context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), log)

    def reserve_port(self, address: str) -> int:
        """Return a free port of this address, and keep it for the process group's store.

        torch would listen on all interfaces. It takes a bound socket instead, whose number stands in MASTER_LISTEN_FD.
        """
        reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's env:// binds the port once more
        reserved.bind((address, 0))
        port = int(reserved.getsockname()[1])
        os.environ["MASTER_LISTEN_FD"] = str(reserved.detach())
        return port

    def prepare(self, environment: dict[str, str], several_nodes: bool) -> None:
        """Set environment variables, and choose the network interface of gloo and NCCL unless the node's environment does.

        By default both would listen on an interface that other machines reach, and gloo on that of the host's name, which other
        nodes often do not reach. So a group on one node gets the loopback interface. On several nodes gloo gets the interface
        of the node's address, and NCCL chooses its own.
        """
        os.environ.update(environment)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a machine that is joined; see `rlx.driver.main`
        interface = _interface_of(ray.util.get_node_ip_address() if several_nodes else LOOPBACK)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if not several_nodes:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")

    def load(self, worker_class: type | str) -> WorkerReply:
        """Import the worker's class, if it is given as `module:Class`."""
        try:
            if isinstance(worker_class, str):
                module, _, name = worker_class.partition(":")
                with without_collection():
                    self._worker_class = getattr(importlib.import_module(module), name)
                gc.freeze()  # modules stay, so later collections need not look at their million objects
            else:
                self._worker_class = worker_class
            return self._reply(None)
        except BaseException as error:
            return self._failed(error)

    def build(self, arguments: tuple[Any, ...]) -> WorkerReply:
        """Build the worker."""
        self._beats_before = beats()
        try:
            assert self._worker_class is not None
            self._worker = self._worker_class(*arguments)
            return self._reply(None)
        except BaseException as error:
            return self._failed(error)

    def call(self, role: str, method: str, answers: bool, *arguments: Any) -> WorkerReply:
        """Run `worker.call(role, method, *arguments)`; send its result only if this rank `answers`."""
        self._beats_before = beats()
        try:
            result = self._worker.call(role, method, *arguments)
            return self._reply(result if answers else None)
        except BaseException as error:  # torch's CheckpointException is no Exception
            return self._failed(error)

    @ray.method(concurrency_group=WATCH)
    def standing(self) -> Standing:
        """Return where the call that runs stands, also when it is stuck."""
        return standing_of(self._thread, beats() - self._beats_before)

    def _reply(self, value: Any) -> WorkerReply:
        return WorkerReply(value, None, self._log.take())

    def _failed(self, error: BaseException) -> WorkerReply:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        return WorkerReply(None, fault_of(self._rank, error), self._log.take())


def _interface_of(address: str) -> str | None:
    cards_of = psutil.net_if_addrs()
    return next((name for name, cards in cards_of.items() if any(card.address == address for card in cards)), None)
