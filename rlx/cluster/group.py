"""A group of worker processes behind three calls."""

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rlx.cluster.errors import Place, RankFault, WorkerFailure, death_of, first_cause, one_line
from rlx.cluster.mesh import Mesh, share_ranges
from rlx.cluster.placement import Placement
from rlx.cluster.process import Answer, WorkerProcess
from rlx.data.batch import Batch, concat

GRACE_S = 2.0  # after an error of a rank's own: time for an earlier one to arrive
COLLECTIVE_GRACE_S = 20.0  # after a collective's error: time for Ray to notice the dead peer behind it

logger = logging.getLogger(__name__)


class WorkerGroup:
    """Worker processes in the places of a pool, one rank each.

    The worker class is built in each process and has a method `call(role, method, *args)`. When a call fails anywhere,
    the whole group is ended and `WorkerFailure` names the first cause.

    Args:
        pool: the places; the group releases it when it closes.
        worker_class: importable class of the workers.
        arguments: what its constructor takes, the same on all ranks.
        meshes: role -> how batches are dealt to the ranks for it; each rank gets a share of its own otherwise.

    Raises:
        WorkerFailure: a process did not start or a constructor raised.
    """

    def __init__(
        self, pool: Placement, worker_class: type, *arguments: Any, meshes: Mapping[str, Mesh] | None = None
    ) -> None:
        self.world_size = len(pool.slots)
        self._pool = pool
        self._meshes = dict(meshes or {})
        self._default_mesh = Mesh.of(self.world_size)
        self._places: dict[int, Place] = {}
        self._open = True
        actor = ray.remote(max_restarts=0, max_task_retries=0)(WorkerProcess)
        self._processes = [actor.options(**pool.options(slot)).remote(rank) for rank, slot in enumerate(pool.slots)]
        try:
            self._places = dict(
                enumerate(self._collect([p.place.remote() for p in self._processes], "worker", "start"))
            )
            self._set_environment()
            shared = ray.put(arguments)
            built = [p.build.remote(worker_class, shared) for p in self._processes]
            self._collect(built, "worker", "__init__")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def mesh(self, role: str) -> Mesh:
        """How batches are dealt to the ranks for this role."""
        return self._meshes.get(role, self._default_mesh)

    def split(self, role: str, method: str, batch: Batch, *args: Any) -> Batch:
        """Each share of the rows goes to its ranks; the answers, one row for each row sent, are joined in order."""
        ranges = share_ranges(len(batch), self.mesh(role).shares)
        answers = self._deal(role, method, batch, ranges, args)
        for rows, answer in zip(ranges, answers, strict=True):
            if len(answer) != len(rows):
                raise ValueError(f"{role}.{method} answered {len(answer)} rows for {len(rows)}; expected one for each")
        return concat(answers)

    def split_metrics(self, role: str, method: str, batch: Batch, *args: Any) -> dict[str, float]:
        """Each share of the rows goes to its ranks; the first rank's metrics come back."""
        answers = self._deal(role, method, batch, share_ranges(len(batch), self.mesh(role).shares), args)
        return answers[0]

    def broadcast(self, role: str, method: str, *args: Any) -> list[Any]:
        """All ranks are called with the same arguments; their results in the order of ranks."""
        shared = [ray.put(arg) for arg in args]
        return self._call(role, method, [shared] * self.world_size, set(range(self.world_size)))

    def close(self) -> None:
        """Ends the processes and gives their places back. May be called again."""
        if self._open:
            self._open = False
            for process in self._processes:
                ray.kill(process)
            self._pool.release()

    def _deal(self, role: str, method: str, batch: Batch, ranges: list[range], args: tuple[Any, ...]) -> list[Any]:
        """Sends the shares out and returns the answer to each."""
        mesh = self.mesh(role)
        shares = [ray.put(batch.rows(rows)) for rows in ranges]
        shared = [ray.put(arg) for arg in args]
        arguments = [[shares[share], *shared] for share in mesh.share_of_rank]
        results = self._call(role, method, arguments, set(mesh.answering_ranks))
        return [results[rank] for rank in mesh.answering_ranks]

    def _call(self, role: str, method: str, arguments: list[list[Any]], answering: set[int]) -> list[Any]:
        if not self._open:
            raise RuntimeError(f"{role}.{method} called on a worker group that is closed or has failed")
        calls = [
            process.call.remote(role, method, rank in answering, *arguments[rank])
            for rank, process in enumerate(self._processes)
        ]
        return self._collect(calls, role, method)

    def _collect(self, calls: list[Any], role: str, method: str) -> list[Any]:
        """The ranks' results; at a failure waits a little for its cause, ends the group and raises that."""
        rank_of = {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        faults: list[RankFault] = []
        seen: set[tuple[int, str, str]] = set()
        give_up_s = float("inf")
        while rank_of and (left_s := give_up_s - time.monotonic()) > 0:
            done, _ = ray.wait(list(rank_of), num_returns=1, timeout=None if left_s == float("inf") else left_s)
            for call in done:
                rank = rank_of.pop(call)
                result = _receive(call, rank)
                if isinstance(result, Answer):
                    _forward(result.log, seen)
                    result = result.fault or result.value
                if isinstance(result, RankFault):
                    faults.append(result)
                    grace_s = COLLECTIVE_GRACE_S if result.kind == "collective" else GRACE_S
                    give_up_s = min(give_up_s, time.monotonic() + grace_s)
                else:
                    results[rank] = result
        if not faults:
            return [results[rank] for rank in range(self.world_size)]
        self.close()
        cause = first_cause(faults)
        others = tuple(fault for fault in faults if fault is not cause)
        raise WorkerFailure(role, method, cause, self._places.get(cause.rank), others)

    def _set_environment(self) -> None:
        """Gives each process its rank and the address at which rank 0 will listen."""
        port = ray.get(self._processes[0].reserve_port.remote())
        common = {
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self._places[0].node_ip,
            "MASTER_PORT": str(port),
        }
        several_nodes = len({place.node_id for place in self._places.values()}) > 1
        cores = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
        prepared = []
        for rank, (process, slot) in enumerate(zip(self._processes, self._pool.slots, strict=True)):
            place = self._places[rank]
            threads = max(1, cores[place.node_id] // self._pool.processes_per_node)
            own = {
                "RANK": str(rank),
                # Ray shows a process with a GPU that one GPU only, as device 0.
                "LOCAL_RANK": "0" if self._pool.gpu else str(slot.local_rank),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            }
            if not self._pool.gpu:
                own["CUDA_VISIBLE_DEVICES"] = ""
            if several_nodes and place.interface:
                # By itself gloo takes the address of the host's name, which is often the loopback's.
                own["GLOO_SOCKET_IFNAME"] = place.interface
            prepared.append(process.prepare.remote({**common, **own}))
        self._collect(prepared, "worker", "prepare")


def _receive(call: Any, rank: int) -> Any:
    """The result of a finished call; a RankFault when Ray cannot give it."""
    try:
        return ray.get(call)
    except RayActorError as error:
        return death_of(rank, str(error))
    except RayError as error:
        return RankFault(rank, "error", one_line(f"{type(error).__name__}: {error}"), str(error))


def _forward(log: tuple[tuple[int, str, str], ...], seen: set[tuple[int, str, str]]) -> None:
    """Logs on the driver what a worker logged, once if several ranks say the same."""
    for record in log:
        if record not in seen:
            seen.add(record)
            level, name, text = record
            logging.getLogger(name).log(level, text)
