"""A group of worker processes, and calls of all of them together."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from rlx.cluster.errors import RankFault, WorkerFailure, WorkerLocation, death_of, first_cause, one_line
from rlx.cluster.placement import Mesh, Placement, share_ranges
from rlx.cluster.process import LOOPBACK, WATCH, Standing, WorkerProcess, WorkerReply

if TYPE_CHECKING:
    from rlx.data.batch import Batch

GRACE_S = 2.0  # after an error of a rank's own: time for an earlier error to arrive
COLLECTIVE_GRACE_S = 20.0  # after a collective's error: time for Ray to notice the dead peer that caused it
LOOK_S = 15.0  # between two looks at ranks that work
SLOW_START_S = 30.0  # processes that start longer than that get a line
ANSWER_S = 5.0  # for the answer where a rank stands
FETCH_S = 0.25  # between two looks at what a call has finished
NOTICE_S = 0.02  # until the end of a call is noticed that something else works beside

Meanwhile = Callable[[list[Any], float], bool]
"""Works on what a call has finished since the last time, at most this long; returns False at once if there is nothing to do."""

logger = logging.getLogger(__name__)


class HangWatch:
    """Decides whether the ranks of a call are stuck: none of those still at work has made progress for too long.

    Progress is a beat, or another place in rlx than at the last look. In a call without beats yet, such as the loading of a
    model, it is any other stack: a library may work at one place in rlx for long. With beats it is not, because an endless loop
    of a user's policy loss gives another stack at each look. A rank that waits for a slow one is not stuck, so the progress of
    any of them counts for all. Times are monotonic; `began_s` is that of the call.
    """

    def __init__(self, timeout_s: float, began_s: float) -> None:
        self._timeout_s, self._since_s, self._looked_s = timeout_s, began_s, began_s
        self._seen: dict[int, tuple[object, ...]] = {}
        self._every_s = min(LOOK_S, timeout_s / 4)
        self.due_s = began_s + self._every_s  # when to look next

    def faults(self, standings: Mapping[int, Standing | None], now_s: float) -> list[RankFault]:
        """Return a fault for each rank if they are stuck, the one that the others probably wait for first; else none.

        The standings are those of the ranks still at work, None for a rank that did not answer.
        """
        progress = {rank: standing.progress for rank, standing in standings.items() if standing is not None}
        was_busy = now_s - self._looked_s > self._timeout_s  # the driver, which looks only while it waits for a call
        if was_busy or any(self._seen.get(rank) != each for rank, each in progress.items()):
            self._seen |= progress
            self._since_s = now_s
        self._looked_s, self.due_s = now_s, now_s + self._every_s
        if now_s - self._since_s < self._timeout_s:
            return []
        stuck, noticed_s = f"no progress for {now_s - self._since_s:.0f} s", time.time()
        silent = f"{stuck}, and no answer: the process is frozen, its node is gone, or native code holds Python's lock"
        # Silent ranks, then working ones, then those in a collective
        order = sorted(standings.items(), key=lambda item: 0 if item[1] is None else 1 + item[1].is_waiting)
        texts = {rank: (f"{stuck} at {each}", each.stack) if each else (silent, "") for rank, each in order}
        return [RankFault(rank, "hung", *text, noticed_s) for rank, text in texts.items()]


@dataclass(eq=False)
class BegunCall:
    """A call that has begun, see `WorkerGroup.begin`."""

    role: str
    method: str
    ranks: Mapping[Any, int]  # of each process's part of it
    watch: HangWatch
    answering: tuple[int, ...] = ()  # the ranks whose results are used
    stream: "_Stream | None" = None

    def __post_init__(self) -> None:
        self.left = dict(self.ranks)  # without parts that ended while another call was waited for


class WorkerGroup(contextlib.AbstractContextManager["WorkerGroup"]):
    """Worker processes in the slots of a placement, one rank each. Each pool of the placement is a process group of torch.

    The processes start in the background; `load` waits for them, and `build` makes a worker in each. Its `at_work(role, method)`
    is a context whose value is the function to call. If a call fails anywhere, the whole group ends and `WorkerFailure` names
    the first cause.

    Args:
        placement: the slots; the group releases it when it closes.
        worker_class: of the workers, or `module:Class`, which this process need not import.
        meshes: by role; without one each rank gets a share of its own.
        hang_timeout_s: seconds without progress on any rank after which a call counts as failed.
        pool_of: the number of the pool that hosts a role; other roles, such as `process`, are in all ranks.
    """

    def __init__(
        self,
        placement: Placement,
        worker_class: type | str,
        meshes: Mapping[str, Mesh] | None = None,
        hang_timeout_s: float = inf,
        pool_of: Mapping[str, int] | None = None,
    ) -> None:
        self.world_size = len(placement.slots)
        self._placement = placement
        self._meshes, self._pool_of = dict(meshes or {}), dict(pool_of or {})
        self._hang_timeout_s = hang_timeout_s
        self._locations: dict[int, WorkerLocation] = {}
        self._open = True
        self._begun: list[BegunCall] = []  # that no one has waited for so far
        # Without events of its calls, which Ray's gcs_server would collect: 17.6 kB per step of a tiny run.
        options = {"enable_task_events": False, "concurrency_groups": {WATCH: 1}}
        actor = ray.remote(max_restarts=0, max_task_retries=0, **options)(WorkerProcess)
        self._processes = [
            actor.options(**placement.options(slot)).remote(rank) for rank, slot in enumerate(placement.slots)
        ]
        self._worker_class = worker_class
        self._loading: dict[Any, int] = {}

    def load(self) -> None:
        """Wait until the processes have started, tell each its rank and the address at which rank 0 will listen, and let them
        import the worker class in the background. Raises WorkerFailure."""
        self._locations = self._collect(self._of_all("start", "location"))
        located = [*self._locations.values()]
        several_nodes = len({location.node_id for location in located}) > 1
        address = located[0].node_ip if several_nodes else LOOPBACK
        port = ray.get(self._processes[0].reserve_port.remote(address))
        common = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        cores = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
        for rank, (process, slot) in enumerate(zip(self._processes, self._placement.slots, strict=True)):
            threads = max(1, cores[located[rank].node_id] // self._placement.processes_per_node)
            number, pool = next((n, each) for n, each in enumerate(self._placement.pools) if rank in each)
            own = {
                "RLX_POOL": str(number),
                "RANK": str(rank - pool.start),
                "WORLD_SIZE": str(len(pool)),
                # Ray shows a process with a GPU only that GPU, as device 0.
                "LOCAL_RANK": "0" if self._placement.gpu else str(slot.local_rank),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            }
            if not self._placement.gpu:
                own["CUDA_VISIBLE_DEVICES"] = ""
            self._loading[process.load.remote(self._worker_class, {**common, **own}, several_nodes)] = rank

    def build(self, *arguments: Any) -> "WorkerGroup":
        """Make a worker in each process, with the same arguments on all ranks, and return the group. Raises WorkerFailure."""
        if not self._loading:
            self.load()
        self._collect(BegunCall("worker", "import", self._loading, self._watch()))
        self._collect(self._of_all("__init__", "build", ray.put(arguments)))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def mesh(self, role: str) -> Mesh:
        return self._meshes.get(role) or Mesh.of(len(self._ranks(role)))

    def _ranks(self, role: str) -> range:
        number = self._pool_of.get(role)
        return range(self.world_size) if number is None else self._placement.pools[number]

    def _watch(self) -> HangWatch:
        return HangWatch(self._hang_timeout_s, time.monotonic())

    def _of_all(self, name: str, method: str, *args: Any) -> BegunCall:
        calls = {getattr(each, method).remote(*args): rank for rank, each in enumerate(self._processes)}
        return BegunCall("worker", name, calls, self._watch())

    def call(self, role: str, method: str, *args: Any, batch: "Batch | None" = None) -> list[Any]:
        """Call all ranks of a role with the same arguments and return their results in the order of ranks.

        With a batch each rank gets its share of the rows as the first argument, and there is one result per share.
        """
        return self.results(self.begin(role, method, *args, batch=batch))

    def begin(
        self, role: str, method: str, *args: Any, batch: "Batch | None" = None, meanwhile: Meanwhile | None = None
    ) -> BegunCall:
        """Begin what `call` does. Other pools can be called before `results`; calls of one process run in their order.

        `meanwhile` gets what the worker's `finished(role)` returns, while this call or another one is waited for.
        """
        if not self._open:
            raise RuntimeError(f"{role}.{method} called on a worker group that is closed or has failed")
        shared, ranks = [ray.put(arg) for arg in args], self._ranks(role)
        sent = [shared] * len(ranks)
        answering = tuple(ranks)
        if batch is not None:
            mesh = self.mesh(role)
            shares = [ray.put(batch.rows(rows)) for rows in share_ranges(len(batch), mesh.shares)]
            sent = [[shares[share], *shared] for share in mesh.share_of_rank]
            answering = tuple(ranks[number] for number in mesh.answering_ranks)
        calls = {
            self._processes[rank].call.remote(role, method, rank in answering, *arguments): rank
            for rank, arguments in zip(ranks, sent, strict=True)
        }
        stream = meanwhile and _Stream([self._processes[rank] for rank in answering], role, meanwhile)
        self._begun.append(BegunCall(role, method, calls, self._watch(), answering, stream))
        return self._begun[-1]

    def results(self, call: BegunCall, beside: BegunCall | None = None) -> list[Any]:
        """Wait for a call that has begun, and for one `beside` it that it works with; return the results of the first."""
        results = self._collect(call, *([beside] if beside else []))
        return [results[rank] for rank in call.answering]

    def split(self, role: str, method: str, batch: "Batch", *args: Any) -> "Batch":
        """Send each share of the rows to its ranks; join the results, one row per row sent, in order. See `call`."""
        from rlx.data.batch import concat  # imports torch, and the workers start before this process has it

        answers = self.call(role, method, *args, batch=batch)
        for rows, answer in zip(share_ranges(len(batch), len(answers)), answers, strict=True):
            if len(answer) != len(rows):
                raise ValueError(f"{role}.{method} answered {len(answer)} rows for {len(rows)}; expected one for each")
        return concat(answers)

    def close(self) -> None:
        """End the processes and release their slots. May be called again."""
        if self._open:
            self._open = False
            for process in self._processes:
                ray.kill(process)
            self._placement.release()

    def _collect(self, *own: BegunCall) -> dict[int, Any]:
        """Return the results of calls by rank. After a failure wait a little for its cause, end the group and raise that.

        A call that has begun in other processes counts too if it fails or hangs meanwhile.
        """
        self._begun = [each for each in self._begun if each not in own]
        rank_of = {call: rank for each in own for call, rank in each.ranks.items()}
        parts = [(own[0].watch, rank_of), *((each.watch, each.left) for each in self._begun)]
        results: dict[int, Any] = {}
        faults: list[RankFault] = []
        seen: set[tuple[int, str, str]] = set()
        role, method = own[0].role, own[0].method
        slow_s = time.monotonic() + SLOW_START_S if method == "start" else inf
        give_up_s = inf
        wait = next((each.stream.wait for each in (*own, *self._begun) if each.stream), _wait)  # at most one has any
        while rank_of and (left_s := give_up_s - time.monotonic()) > 0:
            if not faults:
                due_s = min(watch.due_s for watch, left in parts if left)
                left_s = max(0.0, due_s - time.monotonic())
            for call in wait([call for _, left in parts for call in left], left_s):
                left = next(left for _, left in parts if call in left)
                rank = left.pop(call)
                result = _receive(call, rank, self._locations.get(rank))
                if isinstance(result, WorkerReply):
                    if left is rank_of:
                        _forward(result.log, seen)
                    result = result.fault or result.value
                if isinstance(result, RankFault):
                    faults.append(result)
                    grace_s = COLLECTIVE_GRACE_S if result.kind == "collective" else GRACE_S
                    give_up_s = min(give_up_s, time.monotonic() + grace_s)
                elif left is rank_of:
                    results[rank] = result
            if rank_of and not faults and time.monotonic() > slow_s:
                slow_s = inf
                logger.warning(
                    "%d of %d worker processes have not started after %.0f s; if none does, the reason is in raylet.err or the "
                    "python-core logs of Ray's %s",
                    *(len(rank_of), self.world_size, SLOW_START_S, ray.get_runtime_context().get_session_name()),
                )
            for watch, left in parts:
                if left and not faults and time.monotonic() >= watch.due_s:
                    faults = watch.faults(self._standings(left.values()), time.monotonic())
                    give_up_s = 0.0 if faults else inf
        if not faults:
            return {rank: results[rank] for rank in sorted(results)}
        self.close()
        cause = first_cause(faults)
        for begun in self._begun:
            if cause.rank in begun.ranks.values():
                role, method = begun.role, begun.method
        others = tuple(fault for fault in faults if fault is not cause)
        raise WorkerFailure(role, method, cause, self._locations.get(cause.rank), others)

    def _standings(self, ranks: Iterable[int]) -> dict[int, Standing | None]:
        """Return where these ranks stand; None for those that do not answer."""
        asked = {self._processes[rank].standing.remote(): rank for rank in ranks}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        found: dict[int, Standing | None] = dict.fromkeys(asked.values())
        for answer in answered:
            with contextlib.suppress(RayError):  # the process has died; its call will say so
                found[asked[answer]] = ray.get(answer)
        return found


class _Stream:
    """Fetches what the ranks' call has finished so far, and lets `meanwhile` work on it."""

    def __init__(self, processes: list[Any], role: str, meanwhile: Meanwhile) -> None:
        self._role, self._meanwhile = role, meanwhile
        self._asked = {process.finished.remote(role): process for process in processes}
        self._next_s = time.monotonic() + FETCH_S

    def wait(self, calls: list[Any], timeout_s: float) -> list[Any]:
        """Return the first call that has ended, as `_wait`."""
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            is_busy = self._meanwhile(self._fetched(), min(NOTICE_S, left_s))
            if done := _wait(calls, 0.0 if is_busy else min(FETCH_S, left_s)):
                return done
        return []

    def _fetched(self) -> list[Any]:
        """Return what has arrived, and ask again, if it is time."""
        if not self._asked or time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + FETCH_S
        found: list[Any] = []
        for answer in _wait(list(self._asked), 0.0, len(self._asked)):
            process = self._asked.pop(answer)
            with contextlib.suppress(RayError):  # the process has died; its call will say so
                found += ray.get(answer)
                self._asked[process.finished.remote(self._role)] = process
        return found


def _wait(calls: list[Any], timeout_s: float, most: int = 1) -> list[Any]:
    """Return calls that have ended, after the first of them or this time."""
    return ray.wait(calls, num_returns=most, timeout=timeout_s)[0]  # type: ignore[no-any-return]


def _receive(call: Any, rank: int, location: WorkerLocation | None = None) -> Any:
    """Return the result of a finished call, or a RankFault if Ray cannot give it."""
    try:
        return ray.get(call)
    except (RayActorError, OutOfMemoryError) as error:
        return death_of(rank, str(error), location)
    except RayError as error:
        return RankFault(rank, "error", one_line(f"{type(error).__name__}: {error}"), str(error))


def _forward(log: list[tuple[int, str, str]], seen: set[tuple[int, str, str]]) -> None:
    """Log a worker's records on the driver, equal ones of several ranks once."""
    for record in log:
        if record not in seen:
            seen.add(record)
            level, name, text = record
            logging.getLogger(name).log(level, text)
