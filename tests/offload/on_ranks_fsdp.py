"""Models sharded by FSDP1, FSDP2 and DDP: what their training gives with the engine and without, on each rank."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.offload import OffloadOptions, enable_activation_offloading

WIDTH, BLOCKS, TOKENS = 16, 3, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.o(a), 0.1)
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


def freeze(model):
    """All but values and norms, so that the first layer's input wants no gradient."""
    model.requires_grad_(False)
    for layer in model.layers:
        layer.v.requires_grad_(True)
        layer.norm.requires_grad_(True)


def shard(model, strategy):
    if "frozen" in strategy:
        freeze(model)
    if strategy.startswith("ddp"):
        return DistributedDataParallel(model)
    if strategy.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "mixed" in strategy else MixedPrecisionPolicy()
        options = {"mp_policy": policy, "reshard_after_forward": "kept" not in strategy}
        fully_shard(model.embed, **options)
        for layer in model.layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params="orig" in strategy,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if "mixed" in strategy else None,
    )


@cache
def gathers_all(function):
    return "allgather" in str(function).replace("_", "")


class Gathers(TorchDispatchMode):
    """Counts all-gathers, in forward and in backward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += gathers_all(function)
        return function(*args, **(kwargs or {}))


def batch(seed, rank):
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed + 100 * rank))


def train(model, rank):
    """Two steps of two micro-batches; gradients of the second and the number of all-gathers."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(rank)
    with Gathers() as gathers:
        for number in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                model(batch(10 * number + micro, rank)).backward()
            if number == 0:
                optimizer.step()
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return [grad.clone() for grad in grads if grad is not None], gathers.count


def same(grads, others):
    return len(grads) == len(others) > 0 and all(map(torch.equal, grads, others))


def enable(model, save, **options):
    return enable_activation_offloading(model, save != "all", OffloadOptions(min_bytes=0, save=save, **options))


@cache
def offloaded_bytes_unsharded(frozen, save):
    """What leaves in the same training without FSDP; of shapes alone, so alike for every rank."""
    alone = Model()
    if frozen:
        freeze(alone)
    handle = enable(alone, save)
    train(alone, 0)
    return handle.stats().offloaded_bytes


@cache
def trained_plainly(strategy, rank):
    """Gradients and number of all-gathers without the engine; once for all kinds of saving."""
    plain, gathers = train(shard(Model(), strategy), rank)
    assert gathers >= 4 * 2 * BLOCKS or strategy in ("fsdp2_kept", "ddp")
    return plain, gathers


def results(strategy, save, folder):
    """What this rank finds with a strategy and a kind of saving."""
    rank = dist.get_rank()
    options = {"tier": "disk", "directory": folder} if "disk" in strategy else {}
    if "roomy" in strategy:
        options = {"max_device_bytes": (1 << 40) * rank}  # one rank keeps all layers, the other recomputes them
    plain, gathers = trained_plainly(strategy, rank)
    if "late" in strategy:
        handle = enable(model := Model(), save, **options)
        model = shard(model, strategy)
    else:
        handle = enable(model := shard(Model(), strategy), save, **options)
    grads, gathers_now = train(model, rank)
    stats = handle.stats()
    return {
        "layers_missed": BLOCKS - len(handle.stats(per_layer=True).layers),
        "equal": same(grads, plain),
        "gathers": gathers_now - gathers,
        "held_bytes": stats.held_bytes,
        "is_planned": handle.plan() is not None,
        "moved_more": stats.offloaded_bytes - offloaded_bytes_unsharded("frozen" in strategy, save),
    }
