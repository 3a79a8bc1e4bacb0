"""AdamW, its learning-rate schedule, and clipping of sharded gradients."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from rlx.config.schema import OptimConfig

PART = 32  # parameters


def learning_rate_factor(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Share of the peak learning rate at optimizer step `step` (the first is 0).

    Linear warm-up over w steps, none of them at rate 0, then constant, or a cosine or line down to `min_lr_ratio` at
    `total_steps`.
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
    """AdamW over the parameters that are trained.

    On an accelerator it is torch's fused kernel: it passes once over parameters, gradients and state instead of a dozen times, needs
    no memory beside them, and rounds a parameter in bf16 once in a step. On the CPU it is torch's default.
    """
    trained = [p for p in parameters if p.requires_grad]
    is_fused = all(local(p).device.type != "cpu" for p in trained)
    optimizer = AdamW(trained, lr=optim.lr, fused=is_fused or None, **_constants(optim))
    optimizer.register_load_state_dict_pre_hook(_keep_kernel)
    return optimizer


def _keep_kernel(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state that another kernel has left is taken up by this one, which counts steps where it reads them."""
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {**state, "param_groups": [{**loaded, "fused": own["fused"]} for loaded, own in groups]}


def _constants(optim: OptimConfig) -> dict[str, Any]:
    return {"betas": tuple(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}


def configure(optimizer: AdamW, optim: OptimConfig, lr: float) -> None:
    """Puts the configured numbers in place of those that a loaded state may have brought along."""
    for group in optimizer.param_groups:
        group.update(_constants(optim), lr=lr)


def step_in_parts(optimizer: AdamW) -> None:
    """The optimizer's step, a few parameters at a time.

    For a kernel over sharded parameters the host prepares each of them; a device that has nothing else to do then begins behind
    the first few instead of the last. AdamW treats each parameter by itself, so the bits are those of one step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for start in range(0, len(parameters), PART):
        with stepping_only(optimizer, parameters[start : start + PART]):
            optimizer.step()


@contextmanager
def stepping_only(optimizer: AdamW, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Lets the optimizer see these of its parameters only."""
    ids = set(map(id, parameters))
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in ids]
        yield
    finally:
        for group, before in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = before


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, replicas: int, device: torch.device) -> float:
    """Scales all gradients so that their global norm is at most `max_norm`.

    One way for both kinds of FSDP: the squared norms of all parts are added in fp64 over all processes, so that every
    process gets the same number and, with it, comes to the same decision. A gradient that is not finite is left as it is.

    Args:
        parameters: sharded; those without a gradient are passed over.
        max_norm: largest norm [unit of the gradients].
        replicas: how many processes hold each part.
        device: where the default process group reduces.

    Returns:
        The norm before clipping.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for gradient in gradients:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(gradient, dtype=wide).to(device))
    squares = torch.stack([norm.double() for norm in norms]).square().sum()
    dist.all_reduce(squares)
    norm = (squares / replicas).sqrt().item()
    if math.isfinite(norm) and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
