"""AdamW, its learning-rate schedule, and clipping of sharded gradients."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from rlx.config.schema import OptimConfig
from rlx.engine.fsdp_units import local
from rlx.engine.shard_adamw import NARROW, MasterAdamW, ShardAdamW

PART, PART_ELEMENTS = 32, 1 << 28  # most parameters and elements of a call, which may copy gradients in fp32


def learning_rate_factor(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the share of the peak learning rate at optimizer step `step`; the first step is 0.

    The rate rises linearly over the warm-up, whose first step is above 0. Then it stays constant, or falls along a cosine or
    a line to `min_lr_ratio` at `total_steps`.
    """
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    fall = progress if optim.lr_scheduler_type == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - optim.min_lr_ratio) * fall


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> AdamW:
    """Return AdamW, or the optimizer of torchao that `optim.optimizer` names, over the parameters that are trained.

    On an accelerator this is torch's fused kernel. It reads parameters, gradients and state once instead of a dozen times,
    needs no extra memory, and rounds a bf16 parameter once per step. On the CPU it is torch's default. With
    `optim.master_weights`, bf16 parameters have fp32 masters.
    """
    trained = [p for p in parameters if p.requires_grad]
    if optim.optimizer != "AdamW":
        return _torchao_optimizer(trained, optim)
    is_fused = all(local(p).device.type != "cpu" for p in trained)
    kind = MasterAdamW if optim.master_weights and any(p.dtype in NARROW for p in trained) else ShardAdamW
    optimizer = kind(trained, lr=optim.lr, fused=is_fused or None, **_constants(optim))
    optimizer.register_load_state_dict_pre_hook(_keep_kernel)
    if kind is ShardAdamW:
        optimizer.register_step_pre_hook(lambda stepped, *_: _narrow_gradients(stepped))
    return optimizer


def _torchao_optimizer(trained: list[nn.Parameter], optim: OptimConfig) -> AdamW:
    """Return the optimizer of torchao, an optional package, that `optim.optimizer` names: `_AdamW` or `AdamW8bit`.

    It rounds bf16 weights stochastically: it takes one of the two bf16 neighbours of the exact result, the nearer one more often,
    so that the mean of many results is exact. Updates below the distance of neighbours thus move some weights, without masters.
    Moments in 8 bits have a scale for each 256 numbers (Dettmers et al. 2021, arXiv:2110.02861); tensors below 4,096 numbers keep
    theirs in the weights' type.
    """
    try:
        import torchao.optim
    except ImportError as error:
        text = f"optim.optimizer={optim.optimizer}: needs the package torchao; pip install 'torchao>=0.18', or set it to AdamW"
        raise ImportError(text) from error
    kind = getattr(torchao.optim, optim.optimizer)
    return kind(trained, lr=optim.lr, bf16_stochastic_round=True, **_constants(optim))  # type: ignore[no-any-return]


def state_bytes(optimizer: AdamW, parameter: Tensor) -> int:
    """Return the bytes of AdamW's state for the largest shard: two moments in the parameter's type, or three fp32 numbers.

    All processes get the same number, also where shards differ in size.
    """
    elements = parameter.numel()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        shards = math.prod(mesh.size(dim) for dim, placed in enumerate(parameter.placements) if placed.is_shard())
        elements = -(-elements // shards)
    if isinstance(optimizer, MasterAdamW):
        return 12 * elements
    return elements * 2 * (1 if type(optimizer).__name__ == "AdamW8bit" else parameter.itemsize)


def _narrow_gradients(optimizer: Optimizer) -> None:
    """Round gradients that were summed in a wider type to the type of their parameters, which torch's AdamW needs."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad_dtype = None  # any type
            parameter.grad = parameter.grad.to(parameter.dtype)


def _keep_kernel(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Load a state that another kernel wrote, and keep this optimizer's kernel, which counts steps on its own device."""
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {**state, "param_groups": [{**loaded, "fused": own["fused"]} for loaded, own in groups]}


def _constants(optim: OptimConfig) -> dict[str, Any]:
    return {"betas": tuple(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}


def configure(optimizer: AdamW, optim: OptimConfig, lr: float) -> None:
    """Restore the configured numbers, which loading a state may have replaced."""
    for group in optimizer.param_groups:
        group.update(_constants(optim))
        if isinstance(group["lr"], Tensor):  # torchao's, which compiled code reads
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def step_in_parts(optimizer: AdamW) -> None:
    """Take the optimizer's step a few parameters at a time.

    The host prepares each sharded parameter for the kernel. An idle device can then begin after the first few of them instead
    of after the last. AdamW treats each parameter separately, so the result equals that of one step, bit for bit.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    while parameters:
        ends = accumulate(local(p).numel() for p in parameters[:PART])
        count = max(1, sum(end <= PART_ELEMENTS for end in ends))
        with stepping_only(optimizer, parameters[:count]):
            optimizer.step()
        parameters = parameters[count:]


@contextmanager
def stepping_only(optimizer: AdamW, parameters: Iterable[Tensor], part: Tensor | None = None) -> Iterator[None]:
    """Restrict the optimizer to these of its parameters, or to `part` in place of each."""
    ids = set(map(id, parameters))
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p if part is None else part for p in group["params"] if id(p) in ids]
        yield
    finally:
        for group, before in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = before


@torch.no_grad()
def clip_gradients(optimizer: AdamW, max_norm: float, replicas: int, device: torch.device) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`, and return the norm before that.

    The squared norms of all shards are summed in fp64 over all processes, for both kinds of FSDP. Every process therefore gets
    the same number and takes the same decision. Gradients with a norm that is not finite are left unchanged. With masters the
    optimizer scales the gradients itself, in fp32.

    Args:
        optimizer: over sharded parameters; those without a gradient are skipped.
        max_norm: largest norm [unit of the gradients].
        replicas: number of processes that hold each shard.
        device: where the default process group reduces.
    """
    gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for gradient in gradients:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(gradient, dtype=wide).to(device))
    squares = torch.stack([norm.double() for norm in norms]).square().sum()
    dist.all_reduce(squares)
    norm = (squares / replicas).sqrt().item()
    factor = max_norm / norm if math.isfinite(norm) and norm > max_norm else 1.0
    if isinstance(optimizer, MasterAdamW):
        optimizer.gradient_scale = factor
    elif factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


SAMPLE = 32_768  # numbers of each process at most


class UpdateProbe:
    """Compares a sample of the weights before and after a step: every k-th number of this process's shards, one behind the other.

    A small `share` means that updates are lost to rounding: bf16 weights without masters at a low learning rate. Each tensor counts by
    its size. Every k-th tensor would not do: of Qwen2.5-7B every sixth is a bias or the weight of a norm.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        shards = [local(p).detach().view(-1) for p in parameters]
        *begins, total = accumulate((len(shard) for shard in shards), initial=0)
        # Odd, because an even one would sample few columns of a matrix with an even width.
        every = max(1, -(-total // SAMPLE)) | 1
        views = [shard[-begin % every :: every] for shard, begin in zip(shards, begins, strict=True)]
        self._views = [view for view in views if len(view)]
        self._before = self._sample()

    def sums(self, device: torch.device) -> dict[str, Tensor]:
        """Return sums to add over processes: `changed` and `sampled` elements, squares of `moved` and of `weights`."""
        after = self._sample()
        moved = after.double() - self._before.double()
        figures = {
            "changed": (moved != 0).sum().double(),
            "sampled": torch.tensor(float(moved.numel()), dtype=torch.float64),
            "moved": moved.square().sum(),
            "weights": self._before.double().square().sum(),
        }
        return {name: figure.to(device) for name, figure in figures.items()}

    def _sample(self) -> Tensor:
        picked = torch.cat(self._views or [torch.zeros(0)])
        return picked.to(torch.promote_types(picked.dtype, torch.float32))


def update_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return `update_share`, the share of weights that changed, and `update_length`, |after - before| / |before|."""
    return {
        "update_share": sums["changed"] / max(1.0, sums["sampled"]),
        "update_length": (sums["moved"] / sums["weights"]) ** 0.5 if sums["weights"] else 0.0,
    }
