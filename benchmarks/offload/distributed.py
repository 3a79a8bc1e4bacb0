"""A measurement in processes of this machine; FSDP2 shards every layer over them."""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from benchmarks.offload.measure import Benchmark, Ranks
from rlx.offload.runtime.layers import find_layers

_TIMEOUT = datetime.timedelta(minutes=3)  # longer than any step, and short enough to notice that one rank has failed
_NOTHING_MEASURED = 3


def run_on(world_size: int, benchmark: Benchmark) -> bool:
    """Run a benchmark in `world_size` processes, each on an accelerator of its own if there are any.

    Times are those of the slowest process, peaks the largest; other figures are the first process's. Returns as `Benchmark.run`
    does; a process that fails outside a mode raises torch's ProcessRaisedException.
    """
    try:
        in_processes(world_size, benchmark.device, _run, benchmark)
    except ProcessExitedException as ended:
        if ended.exit_code != _NOTHING_MEASURED:
            raise
        return False
    return True


def in_processes(
    world_size: int,
    device: torch.device,
    work: Callable[..., None],
    *arguments: Any,
    timeout: datetime.timedelta = _TIMEOUT,
) -> None:
    """Call `work(device, *arguments)` in processes of one group, each with an accelerator of its own if `device` is one.

    Args:
        world_size: number of processes.
        device: `work` gets the device of its process.
        work: a function of a module; all processes call it together.
        arguments: of `work`; they are pickled.
        timeout: of collectives.

    Raises:
        ProcessRaisedException: with the traceback of the first process that failed.
    """
    # The store stays here and has its port from the start, so that nobody else can take it while the processes import torch.
    # torch documents the name, but does not export it in a way that mypy follows.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    spawn(_join, (world_size, store.port, timeout, device, work, arguments), nprocs=world_size)  # type: ignore[no-untyped-call]


def _join(
    rank: int,
    world_size: int,
    port: int,
    timeout: datetime.timedelta,
    device: torch.device,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    backend = "gloo"
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        device = torch.device(device.type, rank)
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        work(device, *arguments)
    finally:
        dist.destroy_process_group()


def _run(device: torch.device, benchmark: Benchmark) -> None:
    ranks = Ranks(dist.new_group(backend="gloo", timeout=_TIMEOUT))
    shard = functools.partial(_shard, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    if not benchmark._replace(device=device, adapt=shard).run(ranks):
        sys.exit(_NOTHING_MEASURED)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for _, layer in find_layers(model, None):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
