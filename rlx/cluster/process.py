"""The process of a worker. It imports no torch, so that the environment is set before torch starts."""

import gc
import importlib
import logging
import logging.handlers
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil
import ray

from rlx.cluster import let_idle_threads_sleep, without_collection
from rlx.cluster.errors import RankFault, WorkerLocation, fault_of
from rlx.heartbeat import beats

WATCH = "watch"
"""Ray's concurrency group of `standing` and `finished`. Each group has a thread of its own; all other methods share another one."""

LOOPBACK = "127.0.0.1"
COLLECTIVES = "torch/distributed/"
PACKAGE = str(Path(__file__).parents[1])


@dataclass
class WorkerReply:
    """The result of a call (None from ranks that need not answer) or its fault, and rlx's log: (level, logger, text)."""

    value: Any = None
    fault: RankFault | None = None
    log: list[tuple[int, str, str]] = field(default_factory=list)


class Standing(NamedTuple):
    """Where a rank stands."""

    beats: int  # pieces of work that its process has done so far in this call
    place: str  # file, line and function of rlx where it works
    inside: str  # the innermost ones, if they are not of rlx; else empty
    is_waiting: bool  # inside a collective of torch.distributed, so that it may wait for another rank
    stack: str

    @property
    def progress(self) -> tuple[object, ...]:
        """What changes when the rank makes progress; see `HangWatch`."""
        return (self.beats, self.place) if self.beats else self

    def __str__(self) -> str:
        return f"{self.place}, inside {self.inside}" if self.inside else self.place


def _named(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"


def _is_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames are of torch.distributed; one of rlx ends the search."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        if COLLECTIVES in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class WorkerProcess:
    """Ray actor that sets up a process, builds a worker in it and passes calls on to it.

    It returns exceptions as values, so that they need not be picklable and Ray adds no traceback of its own.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker_class: Any = None
        self._worker: Any = None
        self._thread = 0  # of all calls but those of WATCH
        self._beats_before = 0  # the call that runs
        self._log = queue.SimpleQueue[logging.LogRecord]()  # until the next reply takes it to the driver
        logger = logging.getLogger("rlx")
        logger.addHandler(logging.handlers.QueueHandler(self._log))
        logger.setLevel(logging.INFO)

    def location(self) -> WorkerLocation:
        """Return the node and process of this worker; the first call."""
        self._thread = threading.get_ident()
        context = ray.get_runtime_context()
        log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else None
        return WorkerLocation(self._rank, context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), log)

    def reserve_port(self, address: str) -> int:
        """Return a free port of this address, and keep it for the process group's store.

        torch would listen on all interfaces. It takes a bound socket instead, whose number is in MASTER_LISTEN_FD.
        """
        reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's env:// binds the port once more
        reserved.bind((address, 0))
        port = int(reserved.getsockname()[1])
        os.environ["MASTER_LISTEN_FD"] = str(reserved.detach())
        return port

    def load(self, worker_class: type | str, environment: dict[str, str], several_nodes: bool) -> WorkerReply:
        """Set environment variables, then import the worker's class, if it is given as `module:Class`.

        By default gloo and NCCL would listen on an interface that other machines reach, and gloo on that of the host's name, which
        other nodes often do not reach. So, unless the environment names one, a group on one node gets the loopback interface. On
        several nodes gloo gets that of the node's address, and NCCL chooses its own.
        """
        with self._replying() as reply:
            os.environ.update(environment)
            let_idle_threads_sleep()  # on a machine that was joined; elsewhere the driver has done it
            address, cards_of = ray.util.get_node_ip_address() if several_nodes else LOOPBACK, psutil.net_if_addrs()
            found = (name for name, cards in cards_of.items() if any(card.address == address for card in cards))
            if interface := next(found, None):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                if not several_nodes:
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
            if isinstance(worker_class, str):
                module, _, name = worker_class.partition(":")
                with without_collection():
                    worker_class = getattr(importlib.import_module(module), name)
                gc.freeze()  # modules stay, so later collections need not look at their million objects
            self._worker_class = worker_class
        return reply

    def build(self, arguments: tuple[Any, ...]) -> WorkerReply:
        """Build the worker."""
        with self._replying() as reply:
            self._worker = self._worker_class(*arguments)
        return reply

    def call(self, role: str, method: str, answers: bool, *arguments: Any) -> WorkerReply:
        """Run a method of a role; send its result only if this rank `answers`."""
        with self._replying() as reply, self._worker.at_work(role, method) as function:
            result = function(*arguments)
            reply.value = result if answers else None
        return reply

    @ray.method(concurrency_group=WATCH)
    def standing(self) -> Standing:
        """Return where the call that runs stands, also when it is stuck."""
        done, frame = beats() - self._beats_before, sys._current_frames().get(self._thread)
        if frame is None:
            return Standing(done, "between two calls", "", False, "")
        stack = traceback.extract_stack(frame)
        own = next((each for each in reversed(stack) if each.filename.startswith(PACKAGE)), stack[-1])
        inside = "" if own is stack[-1] else _named(stack[-1])
        text = "".join(traceback.format_list(stack)).rstrip()
        return Standing(done, _named(own), inside, _is_collective(frame), text)

    @ray.method(concurrency_group=WATCH)
    def finished(self, role: str) -> list[Any]:
        """Return what the role's call that runs has finished since the last time."""
        return self._worker.roles[role].finished()  # type: ignore[no-any-return]

    @contextmanager
    def _replying(self) -> Iterator[WorkerReply]:
        """Yield the reply of a block of code, to which its end adds a fault and the log."""
        self._beats_before, reply = beats(), WorkerReply()
        try:
            yield reply
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            reply.value, reply.fault = None, fault_of(self._rank, error)
        records = (self._log.get() for _ in range(self._log.qsize()))
        reply.log = [(each.levelno, each.name, each.getMessage()) for each in records]
