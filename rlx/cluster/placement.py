"""Reserve a slot in the cluster for every worker process."""

import logging
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.cluster.errors import ClusterError

CPU_SHARE = 0.01  # of a core, so that Ray never limits the number of CPU processes
_PATIENCE_S = 10.0
_WAIT_S = 300.0

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
    """Reserved slots; ranks fill one node after the other.

    Args:
        group: Ray's placement group with one bundle per node, each on a node of its own.
        slots: one per rank.
        processes_per_node: ranks on each node.
        gpu: whether each process has a GPU.
    """

    group: PlacementGroup
    slots: tuple[Slot, ...]
    processes_per_node: int
    gpu: bool

    @classmethod
    def reserve(cls, nnodes: int, processes_per_node: int, device: str) -> "Placement":
        """Reserve slots, waiting until the cluster has room.

        Args:
            nnodes: different nodes to use.
            processes_per_node: processes on each; on `cuda` each with a GPU of its own.
            device: `cpu` or `cuda`.

        Raises:
            PlacementError: there was no room in time; it names the request and the cluster's resources.
        """
        gpu = device != "cpu"
        bundle = {"CPU": CPU_SHARE * processes_per_node} | ({"GPU": float(processes_per_node)} if gpu else {})
        group = placement_group([bundle] * nnodes, strategy="STRICT_SPREAD")
        try:
            if not group.wait(_PATIENCE_S):
                asked = f"{nnodes} node(s) with {processes_per_node} {'GPU(s)' if gpu else 'CPU process(es)'} each"
                logger.warning("waiting up to %.0f s for %s; the cluster has %s", _WAIT_S, asked, _inventory())
                if not group.wait(_WAIT_S - _PATIENCE_S):
                    raise PlacementError(
                        f"asked for {asked}, got no room within {_WAIT_S:.0f} s; the cluster has {_inventory()}; "
                        "lower trainer.nnodes or trainer.n_gpus_per_node, add nodes, or wait for other jobs to end"
                    )
        except BaseException:
            remove_placement_group(group)
            raise
        order = _bundles_by_node(group)
        slots = tuple(Slot(b, local_rank) for b in order for local_rank in range(processes_per_node))
        return cls(group, slots, processes_per_node, gpu)

    def options(self, slot: Slot) -> dict[str, object]:
        """Return the options of the Ray actor in this slot."""
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
