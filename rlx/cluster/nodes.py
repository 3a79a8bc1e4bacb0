"""How many nodes of a joined cluster a run takes, if one may stay away."""

import time
from collections.abc import Callable

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

WAIT_S = 120.0  # for nodes that are missing, such as one that is starting again
NODE_ANSWER_S = 15.0


def alive_nodes(gpus: int) -> int:
    """Return the number of nodes of the joined cluster that have at least `gpus` GPUs and answer.

    Ray takes half a minute to miss a node that was lost, but a restart comes sooner, so the nodes are asked.
    """
    listed = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= gpus]
    asked = [
        _answer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(each, soft=False)).remote()
        for each in listed
    ]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=NODE_ANSWER_S) if asked else ([], [])
    return sum(_is_well(each) for each in answered)


@ray.remote(num_cpus=0, max_retries=0)
def _answer() -> None:
    """Do nothing; the node that can is alive."""


def _is_well(answer: "ray.ObjectRef[None]") -> bool:
    try:
        ray.get(answer)
    except ray.exceptions.RayError:
        return False
    return True


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
