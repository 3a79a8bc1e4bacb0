"""How many nodes of a joined cluster a run takes, if one may stay away."""

import time
from collections.abc import Callable

import ray

WAIT_S = 120.0  # for nodes that are missing, such as one that is starting again


def alive_nodes(gpus: int) -> int:
    """Return the number of living nodes of the joined cluster with at least `gpus` GPUs."""
    return sum(node["Alive"] and node["Resources"].get("GPU", 0) >= gpus for node in ray.nodes())


def nodes_to_take(
    wanted: int, least: int, alive: Callable[[], int], clock: Callable[[], float], sleep: Callable[[float], None]
) -> int:
    """Wait for nodes; return `wanted` if so many come in time, else as many as there are, at least `least`.

    Args:
        wanted: `trainer.nnodes`.
        least: `trainer.min_nodes`.
        alive: returns the number of nodes.
        clock, sleep: seconds; parameters for tests.
    """
    deadline_s = clock() + WAIT_S
    while alive() < wanted and clock() < deadline_s:
        sleep(1.0)
    return min(wanted, max(least, alive()))


def wait_for_nodes(wanted: int, least: int, gpus: int) -> int:
    """Return how many nodes to take, each with at least `gpus` GPUs. See `nodes_to_take`."""
    return nodes_to_take(wanted, least, lambda: alive_nodes(gpus), time.monotonic, time.sleep)
