"""Start Ray and the worker processes while this process imports what the run needs.

It imports little itself: torch, transformers and the trainer take seconds, in which Ray mostly waits for its own processes.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread, get_native_id
from typing import TYPE_CHECKING

from rlx.cluster import without_collection
from rlx.config.machine import processes
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import pools_of_roles, sharded_roles

if TYPE_CHECKING:
    from rlx.cluster.group import WorkerGroup

WORKERS = "rlx.workers.worker"


def launch(config: PPOConfig, yaml: str) -> Path:
    """Train as configured and return the folder of the run; arguments and errors are those of `rlx.trainer.run.run`."""
    if "console" in config.trainer.logger:
        own = config.trainer.nnodes * config.trainer.n_rollout_gpus
        sampling = f", and {own} that sample(s)" if own else ""
        print(f"starting Ray and {processes(config)} process(es){sampling}", flush=True)
    Thread(target=_import_ahead, daemon=True).start()
    from rlx.cluster.runtime import session

    with session(config), start_workers(config) as workers:
        workers.load()  # it takes longer than what `run` prepares
        from rlx.trainer.run import run

        return run(config, yaml, workers)


def _import_ahead() -> None:
    """Import what `launch` needs, in a thread of low priority: Ray's processes, which start meanwhile, take longer."""
    if sys.platform == "linux":  # elsewhere the priority would be that of the process
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 10)
    with suppress(Exception), without_collection():  # the import that is needed says why it fails
        import rlx.trainer.run  # noqa: F401


def start_workers(config: PPOConfig) -> "WorkerGroup":
    """Start the processes of the run, which import their code in the background.

    Each will host every role, but with `n_rollout_gpus` some only `rollout` and the others all but it.
    """
    from rlx.cluster.group import WorkerGroup
    from rlx.cluster.placement import Mesh, Placement
    from rlx.cluster.runtime import accelerator

    trainer = config.trainer
    device = accelerator() if trainer.device == "auto" else trainer.device
    sizes = [trainer.n_gpus_per_node, *([trainer.n_rollout_gpus] if trainer.n_rollout_gpus else [])]
    placement = Placement.reserve(trainer.nnodes, sizes, device)
    pool_of = pools_of_roles(config)
    # A tensor-parallel group of processes generates the same samples, and a sequence-parallel one gets the same rows.
    together = {role.name: role.sequence_parallel_size for role in sharded_roles(config)}
    together["rollout"] = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    meshes = {role: Mesh.of(len(placement.pools[pool_of[role]]), ranks) for role, ranks in together.items()}
    return WorkerGroup(placement, f"{WORKERS}:Worker", meshes, trainer.hang_timeout_s, pool_of)
