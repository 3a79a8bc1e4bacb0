"""FSDP1 and FSDP2 in two processes on the CPU: equal gradients, and not one all-gather more."""

import json
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import profile

from rlx.offload import OffloadOptions, enable_activation_offloading

WIDTH, BLOCKS, RANKS = 16, 3, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.norm.weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def shard(model, strategy):
    if strategy == "fsdp2":
        fully_shard(model.embed)
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)
    policy = ModuleWrapPolicy({Block})
    use_orig_params = strategy == "fsdp1_orig"
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


def train(model, rank):
    """Two steps of two micro-batches; gradients of the second and the number of all-gathers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile() as record:
        for number in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + micro + 100 * rank))
                model(x).backward()
            if number == 0:
                optimizer.step()
    gathers = sum(event.count for event in record.key_averages() if "allgather" in event.key.lower().replace("_", ""))
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return [grad.clone() for grad in grads if grad is not None], gathers


def worker(rank, port, folder):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both processes on the CPU, also where there is a GPU
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    results = []
    try:
        for strategy in ("fsdp2", "fsdp1", "fsdp1_orig"):
            plain, gathers = train(shard(Model(), strategy), rank)
            assert gathers > 0
            for enable_ckpt in (True, False):
                model = shard(Model(), strategy)
                handle = enable_activation_offloading(model, enable_ckpt, OffloadOptions(min_bytes=0))
                grads, gathers_now = train(model, rank)
                stats = handle.stats()
                results.append(
                    {
                        "case": (strategy, enable_ckpt, rank),
                        "layers": len(handle.engine.layers),
                        "equal": len(grads) == len(plain) > 0 and all(map(torch.equal, grads, plain)),
                        "gathers": gathers_now - gathers,
                        "held_bytes": stats.held_bytes,
                        "moved_per_call": stats.offloaded_bytes / (4 * BLOCKS),
                    }
                )
    finally:
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outcomes")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, folder), nprocs=RANKS)
    results = [outcome for rank in range(RANKS) for outcome in json.loads((folder / f"{rank}.json").read_text())]
    return {tuple(outcome["case"]): outcome for outcome in results}


@pytest.mark.parametrize("enable_ckpt", [True, False], ids=["boundary", "all"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "fsdp1_orig"])
def test_sharded_gradients_are_equal_and_nothing_more_is_gathered(outcomes, strategy, enable_ckpt):
    for rank in range(RANKS):
        outcome = outcomes[strategy, enable_ckpt, rank]
        assert outcome["layers"] == BLOCKS
        assert outcome["equal"]
        assert outcome["gathers"] == 0
        assert outcome["held_bytes"] == 0
        hidden, norm_statistics = 4 * WIDTH * 4, 2 * 4 * 4
        # boundary: each block's input; all: what each block saves, of which no byte is a parameter's
        assert outcome["moved_per_call"] == (hidden if enable_ckpt else 5 * hidden + norm_statistics)


@pytest.mark.parametrize("enable_ckpt", [True, False], ids=["boundary", "all"])
def test_dtensors_stay_and_are_right(compare, toys, enable_ckpt):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def forward(block, x):
            spread = DTensor.from_local(block.lin(x), mesh, [Shard(0)])
            return torch.tanh(spread).to_local() + x

        def between_layers(block, x):
            x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
            return DTensor.from_local(block.lin(x.to_local()), mesh, [Replicate()]).exp() * x

        compare(toys.of(forward), toys.step, enable_ckpt)
        model = toys.of(between_layers)
        model.head = nn.Sequential(Local(), model.head)
        compare(model, toys.step, enable_ckpt)
    finally:
        dist.destroy_process_group()


class Local(nn.Module):
    def forward(self, x):
        return x.to_local()
