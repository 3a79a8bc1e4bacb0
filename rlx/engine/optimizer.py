"""AdamW on shards with fp32 masters, its learning-rate schedule, and clipping of sharded gradients.

Note [no DTensors in AdamW]
torch's AdamW would step the DTensors of FSDP2. An operation on a DTensor looks up its layout in caches that have no limit and
whose keys hold the operation's numbers. AdamW's numbers differ in each step, because they hold powers of its betas, so the caches
grew with every step: by 17 kB for a model of 0.1 MB (torch 2.11). A shard is a plain tensor, which needs no layout.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from rlx.config.schema import OptimConfig
from rlx.engine.fsdp_units import local

PART, PART_ELEMENTS = 32, 1 << 28  # most parameters and elements of a call, which may copy gradients in fp32
SAMPLE = 32_768  # numbers of each process at most, whose change is measured
MASTER = "master"
NARROW = (torch.bfloat16, torch.float16)


class ShardAdamW(AdamW):
    """AdamW with the same state and, bit for bit, the same steps; moments have `state_dtype`, None: that of the parameters."""

    state_dtype: torch.dtype | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter].update(self.new_state(parameter))
            self.step_group(group, trained, [self.state[p] for p in trained])

    def step_group(self, group: dict[str, Any], trained: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        step_shards(group, [local(p) for p in trained], [local(p.grad) for p in trained], states)

    @torch.no_grad()
    def new_state(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the state before the first step by name, each tensor made when it is asked for."""
        is_fused = any(group["fused"] for group in self.param_groups)
        # The fused kernel reads the count on the device.
        yield "step", torch.zeros((), dtype=torch.float32, device=local(parameter).device if is_fused else None)
        for name in ("exp_avg", "exp_avg_sq"):
            yield name, torch.zeros_like(parameter, dtype=self.state_dtype, requires_grad=False)


def step_shards(
    group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], states: Sequence[dict[str, Tensor]]
) -> None:
    """Step weights, which are shards, with the options of a group of AdamW's parameters; the states may be DTensors."""
    moments, squares = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
    adamw(
        weights,
        gradients,
        moments,
        squares,
        [],
        [state["step"] for state in states],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class MasterAdamW(ShardAdamW):
    """AdamW whose state has, besides both moments, an fp32 master of each bf16 or fp16 parameter.

    A bf16 weight of 0.02 changes in steps of 1.2e-4, and AdamW with lr 1e-6 asks for 1e-6: rounding to nearest returns the old weight.
    A master copy in fp32 sums such updates until the bf16 weight, which is the master rounded to nearest, moves.

    A step equals AdamW's on the masters with the same gradients in fp32, bit for bit: gradients are widened first, then clipped by
    `gradient_scale`. The state holds `step`, `exp_avg`, `exp_avg_sq` and `master`, all fp32, sharded like the parameter.
    """

    state_dtype = torch.float32

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any):
        super().__init__(parameters, **options)
        self.gradient_scale = 1.0

    def step_group(self, group: dict[str, Any], trained: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        masters = [local(state[MASTER]) for state in states]
        step_shards(group, masters, [self._widened(local(p.grad)) for p in trained], states)
        for parameter, master in zip(trained, masters, strict=True):
            local(parameter).copy_(master)

    def _widened(self, gradient: Tensor) -> Tensor:
        wide = gradient.float()
        if self.gradient_scale == 1.0:
            return wide
        return wide * self.gradient_scale if wide is gradient else wide.mul_(self.gradient_scale)

    @torch.no_grad()
    def new_state(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As ShardAdamW.new_state; the master is last."""
        yield from super().new_state(parameter)
        yield MASTER, parameter.detach().to(torch.float32, copy=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state and keep its fp32 numbers, which torch's optimizers would round to the parameters' type."""
        super().load_state_dict(dict(state_dict))
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(device=parameter.device, dtype=torch.float32, copy=True)


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

    On an accelerator this is torch's fused kernel, which needs no extra memory and rounds a bf16 parameter once per step. On the CPU
    it is torch's default. With `optim.master_weights`, bf16 parameters have fp32 masters.

    torchao's `_AdamW` and `AdamW8bit` round bf16 weights stochastically, so that the mean of many results is exact without masters.
    Moments in 8 bits have a scale for each 256 numbers (arXiv:2110.02861); tensors below 4,096 numbers keep theirs as they are.
    """
    trained, constants = [p for p in parameters if p.requires_grad], _constants(optim)
    if optim.optimizer != "AdamW":
        import torchao.optim  # the configuration's check has found it

        kind = getattr(torchao.optim, optim.optimizer)
        return kind(trained, lr=optim.lr, bf16_stochastic_round=True, **constants)  # type: ignore[no-any-return]
    is_fused = all(local(p).device.type != "cpu" for p in trained)
    kind = MasterAdamW if optim.master_weights and any(p.dtype in NARROW for p in trained) else ShardAdamW
    optimizer = kind(trained, lr=optim.lr, fused=is_fused or None, **constants)
    optimizer.register_load_state_dict_pre_hook(_keep_kernel)
    if kind is ShardAdamW:
        optimizer.register_step_pre_hook(lambda stepped, *_: _narrow_gradients(stepped))
    return optimizer


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
    """Take the optimizer's step a few parameters at a time: an idle device begins while the host prepares the next ones.

    AdamW treats each parameter separately, so the result equals that of one step, bit for bit.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    while parameters:
        ends = accumulate(local(p).numel() for p in parameters[:PART])
        count = max(1, sum(end <= PART_ELEMENTS for end in ends))
        with stepping_only(optimizer, {id(p): p for p in parameters[:count]}):
            optimizer.step()
        parameters = parameters[count:]


@contextmanager
def stepping_only(optimizer: AdamW, chosen: Mapping[int, Tensor]) -> Iterator[None]:
    """Restrict the optimizer to some of its parameters: by their ids, what it steps in place of each."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [chosen[id(p)] for p in group["params"] if id(p) in chosen]
        yield
    finally:
        for group, before in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = before


@torch.no_grad()
def clip_gradients(optimizer: AdamW, max_norm: float, replicas: int, device: torch.device) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`, and return the norm before that.

    The squared norms of all shards, which `replicas` processes hold, are summed in fp64, so every process takes the same decision.
    Gradients with a norm that is not finite stay unchanged. With masters the optimizer scales the gradients itself, in fp32.
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


class UpdateProbe:
    """Compares a sample of the weights before and after a step: every k-th number of this process's concatenated shards.

    A small `share` means that updates are lost to rounding: bf16 weights without masters at a low learning rate. Every k-th tensor
    would not do: of Qwen2.5-7B every sixth is a bias or the weight of a norm.
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
