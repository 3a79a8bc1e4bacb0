"""Where the worker processes of a run are: nodes, a slot for each process, and which processes share rows of a batch."""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlx.cluster.errors import ClusterError

CPU_SHARE = 0.01  # of a core, so that Ray never limits the number of CPU processes
_PATIENCE_S = 10.0
_WAIT_S = 300.0
NODES_WAIT_S = 120.0  # for nodes that are missing, such as one that is starting again
NODE_ANSWER_S = 15.0

logger = logging.getLogger(__name__)


class PlacementError(ClusterError, ValueError):
    """The cluster had no room within the time allowed."""


@dataclass(frozen=True)
class Slot:
    """The slot of one process: its bundle (one per node) and its number on that node."""

    bundle: int
    local_rank: int


@dataclass(frozen=True)
class Placement:
    """Reserved slots; the ranks of a pool fill one node after the other."""

    group: PlacementGroup  # one bundle per node, each on a node of its own
    slots: tuple[Slot, ...]  # one per rank
    processes_per_node: int
    gpu: bool  # whether each process has one
    pools: tuple[range, ...]  # the ranks of each process group

    @classmethod
    def reserve(cls, nnodes: int, pools: Sequence[int], device: str) -> "Placement":
        """Reserve slots on so many different nodes, on `cuda` each with a GPU of its own, and wait until there is room.

        `pools` are the processes of each pool on a node.

        Raises PlacementError, which names the request and the cluster's resources, if there is none in time.
        """
        gpu, processes_per_node = device != "cpu", sum(pools)
        bundle = {"CPU": CPU_SHARE * processes_per_node} | ({"GPU": float(processes_per_node)} if gpu else {})
        group = placement_group([bundle] * nnodes, strategy="STRICT_SPREAD")
        try:
            if not group.wait(_PATIENCE_S):
                asked = f"{nnodes} node(s) with {processes_per_node} {'GPU(s)' if gpu else 'CPU process(es)'} each"
                logger.warning("waiting up to %.0f s for %s; the cluster has %s", _WAIT_S, asked, _inventory())
                if not group.wait(_WAIT_S - _PATIENCE_S):
                    raise PlacementError(
                        f"asked for {asked}, got no room within {_WAIT_S:.0f} s; the cluster has {_inventory()}; "
                        f"lower trainer.nnodes or trainer.n_gpus_per_node{' or trainer.n_rollout_gpus' * (len(pools) > 1)}, "
                        "add nodes, or wait for other jobs to end"
                    )
        except BaseException:
            remove_placement_group(group)
            raise
        order = _bundles_by_node(group)
        ends = [*accumulate(pools, initial=0)]
        own = [[Slot(bundle, at) for bundle in order for at in range(*ends_of)] for ends_of in pairwise(ends)]
        ranks = tuple(range(nnodes * first, nnodes * end) for first, end in pairwise(ends))
        return cls(group, tuple(chain(*own)), processes_per_node, gpu, ranks)

    def options(self, slot: Slot) -> dict[str, object]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=slot.bundle)
        return {"num_cpus": CPU_SHARE, "num_gpus": 1 if self.gpu else 0, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Release the slots; Ray ends the actors that are still in them."""
        remove_placement_group(self.group)


def _bundles_by_node(group: PlacementGroup) -> list[int]:
    """Return bundle numbers in the order of their nodes' addresses, which is the same in every run on the same nodes."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of = placement_group_table(group)["bundles_to_node_id"]
    return sorted(node_of, key=lambda bundle: (address[node_of[bundle]], node_of[bundle]))


def _inventory() -> str:
    """Describe the cluster's resources and how much of them is free."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [f"{r.get('CPU', 0):g} CPUs and {r.get('GPU', 0):g} GPUs" for r in alive]
    free = ray.available_resources()
    return f"{len(nodes)} node(s) ({'; '.join(nodes)}), of which {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"


@dataclass(frozen=True)
class Mesh:
    """The distribution of a batch's shares over the ranks of a group."""

    # Ranks that work on one share together (tensor or sequence parallel) have the same number
    share_of_rank: tuple[int, ...]
    answering_ranks: tuple[int, ...]  # for each share the rank whose result is used

    @classmethod
    def of(cls, world_size: int, ranks_per_share: int = 1) -> "Mesh":
        """Return a mesh in which neighbouring ranks work together on a share and the first of them answers."""
        shares = tuple(rank // ranks_per_share for rank in range(world_size))
        return cls(shares, tuple(range(0, world_size, ranks_per_share)))

    @property
    def shares(self) -> int:
        return len(self.answering_ranks)


def share_ranges(rows: int, shares: int) -> list[range]:
    """Return contiguous row ranges, longer ones first, whose lengths differ by at most one."""
    size, rest = divmod(rows, shares)
    starts = [share * size + min(share, rest) for share in range(shares + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def nodes_to_take(wanted: int, least: int, gpus: int, wait_s: float = NODES_WAIT_S) -> int:
    """Wait for nodes with so many GPUs; return `wanted` if so many come in time, else as many as there are, at least `least`."""
    deadline_s = time.monotonic() + wait_s
    while (alive := _answering_nodes(gpus)) < wanted and time.monotonic() < deadline_s:
        time.sleep(1.0)
    return min(wanted, max(least, alive))


def _answering_nodes(gpus: int) -> int:
    """Ask the nodes: Ray takes half a minute to miss a node that was lost, but a restart comes sooner."""
    listed = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= gpus]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in listed]
    asked = [_answer.options(scheduling_strategy=each).remote() for each in strategies]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=NODE_ANSWER_S) if asked else ([], [])
    alive = 0
    for answer in answered:
        with suppress(ray.exceptions.RayError):
            alive += ray.get(answer)
    return alive


@ray.remote(num_cpus=0, max_retries=0)
def _answer() -> int:
    return 1
