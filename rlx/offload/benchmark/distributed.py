"""A measurement in processes of this machine; FSDP2 shards every layer over them."""

from __future__ import annotations

import datetime
import functools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from rlx.offload.benchmark.measure import Benchmark, Ranks
from rlx.offload.runtime.layers import find_layers

_TIMEOUT = datetime.timedelta(minutes=3)  # longer than any step, and short enough to notice that one rank has failed
_NOTHING_MEASURED = 3


def run_on(world_size: int, benchmark: Benchmark) -> bool:
    """Run a benchmark in `world_size` processes, each on an accelerator of its own if there are any.

    Times are those of the slowest process, peaks the largest; other figures are the first process's. Returns as `Benchmark.run`
    does; a process that fails outside a mode raises torch's ProcessRaisedException.
    """
    # The store stays here and has its port from the start, so that nobody else can take it while the processes import torch.
    # torch documents the name, but does not export it in a way that mypy follows.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    try:
        spawn(_work, (world_size, store.port, benchmark), nprocs=world_size)  # type: ignore[no-untyped-call]
    except ProcessExitedException as ended:
        if ended.exit_code != _NOTHING_MEASURED:
            raise
        return False
    return True


def _work(rank: int, world_size: int, port: int, benchmark: Benchmark) -> None:
    device = benchmark.device
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        device = torch.device(device.type, rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=dist.TCPStore("127.0.0.1", port, timeout=_TIMEOUT),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    try:
        ranks = Ranks(dist.new_group(backend="gloo", timeout=_TIMEOUT))
        shard = functools.partial(_shard, mesh=init_device_mesh(device.type, (world_size,)))
        is_measured = benchmark._replace(device=device, adapt=shard).run(ranks)
    finally:
        dist.destroy_process_group()
    if not is_measured:
        sys.exit(_NOTHING_MEASURED)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for _, layer in find_layers(model, None):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
