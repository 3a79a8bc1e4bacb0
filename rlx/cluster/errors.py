"""Errors of workers, and which of several came first."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlx.errors import ExplainedError, kernel_line, shown
from rlx.supervisor.link import OUT_OF_MEMORY

Kind = Literal["error", "died", "memory", "collective", "hung"]

_DISTRIBUTED_TYPES = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_DISTRIBUTED_MARKS = ("gloo", "nccl", "tcpstore", "c10d", "connection closed by peer", "connection reset by peer")
_LOG_LINES_SHOWN = 20
_OTHERS_SHOWN = 3
_USERS_SHOWN = 6  # with the line of headings
_MEMORY_USED = re.compile(r"low on memory.*? was (\S+ used / \S+) limit", re.DOTALL)
_LESS_MEMORY = (
    "A restart would need the same: lower data.train_batch_size, actor_rollout_ref.rollout.n or data.max_response_length, start "
    "fewer processes (trainer.n_gpus_per_node), or end other programs"
)
_RAY_MARKS = (":job_id:", ":actor_name:")


class ClusterError(ExplainedError, RuntimeError):
    """The cluster cannot be reached, or lacks what was asked for."""


class RayStartError(ClusterError):
    """Ray did not come up on this machine; a restart may help."""


@dataclass(frozen=True)
class WorkerLocation:
    """The node and process of a worker, and the file on that node with its standard error, if known."""

    rank: int
    node_id: str
    node_ip: str
    pid: int
    log: str | None = None


@dataclass(frozen=True)
class RankFault:
    """One rank's failure."""

    rank: int
    # error: an exception of its own; died: its process ended; memory: it was killed for memory; collective: an exception of
    # torch.distributed, which usually follows from another rank's failure; hung: no progress
    kind: Kind
    summary: str  # one line
    detail: str = ""  # traceback or Ray's report; may be empty
    time_s: float = field(default_factory=time.time)  # wall-clock time at which it was noticed
    curable: bool = True  # whether a restart may help


def fault_of(rank: int, error: BaseException) -> RankFault:
    """Return a picklable description of an exception caught in a worker; see ExplainedError for whose traceback it has."""
    kind: Kind = "collective" if _is_collective(error) else "error"
    told = error.__cause__ if isinstance(error, ExplainedError) else error
    detail = shown(told) if told else ""
    return RankFault(rank, kind, one_line(f"{type(error).__name__}: {error}"), detail, curable=is_curable(error))


def death_of(rank: int, report: str, location: WorkerLocation | None = None) -> RankFault:
    """Return the description of a process that ended, from Ray's report on its actor and the kernel's, if it can be read."""
    if (used := _MEMORY_USED.search(report)) is not None:
        users = report.partition("memory users:")[2].splitlines()[:_USERS_SHOWN]
        return RankFault(rank, "memory", f"Ray killed it: {used[1]} of host memory. {_LESS_MEMORY}", "\n".join(users))
    if location is not None and location.log and Path(location.log).exists() and (line := kernel_line(location.pid)):
        return RankFault(rank, "memory", f"the kernel killed it: {line}. {_LESS_MEMORY}")
    reason = one_line(report).rpartition("The actor is dead because ")[2].partition(" Some common causes")[0]
    summary = f"the worker process died: {reason}"
    if "SYSTEM_ERROR" in reason:
        summary += " It was killed (out of memory, or by hand) or crashed."
    return RankFault(rank, "died", summary)


def is_curable(error: BaseException) -> bool:
    """Whether a restart may help: devices, files and connections fail with these types, mistakes in code or data with others."""
    if isinstance(error, WorkerFailure):
        return error.fault.curable
    if isinstance(error, RayStartError):
        return True
    if isinstance(error, ExplainedError | NotImplementedError | RecursionError):
        return False
    return isinstance(error, RuntimeError | OSError | EOFError | MemoryError) or _is_of_ray(error)


def end_of(error: Exception) -> dict[str, str | bool]:
    """Return the fields of the supervisor's `End` for a driver that this error ends."""
    if not isinstance(error, WorkerFailure):
        name = type(error).__name__
        reason = one_line(str(error)) if isinstance(error, ExplainedError) else one_line(f"{name}: {error}")
        return {"reason": reason, "error": "" if _is_of_ray(error) else name, "curable": is_curable(error)}
    name = f"{error.cause.partition(':')[0]} in {error.role}.{error.method}" if error.fault.kind == "error" else ""
    return {
        "reason": str(error).rpartition("\n")[2],
        "error": OUT_OF_MEMORY if error.fault.kind == "memory" else name,
        "curable": error.fault.curable,
    }


def _is_of_ray(error: BaseException) -> bool:
    return type(error).__module__.startswith("ray.")


def one_line(text: str) -> str:
    """Return `text` with each run of white space replaced by one blank."""
    return " ".join(text.split())


def _is_collective(error: BaseException) -> bool:
    """Whether torch.distributed raised the error. Gloo and the stores raise plain RuntimeErrors, known by their text."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _DISTRIBUTED_TYPES:
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _DISTRIBUTED_MARKS)


def first_cause(faults: Sequence[RankFault]) -> RankFault:
    """Return the failure that the others follow from: the earliest that is not a collective's, else the earliest."""
    return min(faults, key=lambda fault: (fault.kind == "collective", fault.time_s))


class WorkerFailure(ExplainedError, RuntimeError):
    """A call on a worker group failed; the last line of its text is the first cause.

    `location` is None for a worker that never started; `others` are the reports of other ranks in the meantime.
    """

    may_be_wrapped = False

    def __init__(
        self,
        role: str,
        method: str,
        fault: RankFault,
        location: WorkerLocation | None = None,
        others: tuple[RankFault, ...] = (),
    ) -> None:
        super().__init__(role, method, fault, location, others)
        self.role, self.method, self.fault, self.location, self.others = role, method, fault, location, others
        self.rank, self.cause = fault.rank, fault.summary

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.location:
            where += f" (pid {self.location.pid} on {self.location.node_ip})"
        parts = [f"{self.role}.{self.method} failed on {where}", self.fault.detail]
        if self.fault.kind == "died" and self.location and self.location.log:
            parts.append(_log_tail(Path(self.location.log)))
        parts += [f"meanwhile on rank {other.rank}: {other.summary}" for other in self.others[:_OTHERS_SHOWN]]
        parts.append(f"{where}, {self.role}.{self.method}: {self.cause}")
        return "\n".join(part for part in parts if part)


def _log_tail(log: Path) -> str:
    """The last lines of a dead worker's standard error if its file is on this machine, else where to look."""
    if not log.is_file():
        return f"standard error on its node: {log}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith(_RAY_MARKS)]
    if not lines:
        return ""
    lines = lines[-_LOG_LINES_SHOWN:]
    return "\n".join([f"standard error ({log}):", *(f"  {line}" for line in lines)])
