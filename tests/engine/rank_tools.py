"""What the functions that run on ranks share: engines, a batch, gradients and full weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rlx.config.schema import (
    ActorConfig,
    CriticConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimConfig,
    RolloutCorrectionConfig,
)
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.fsdp_units import whole
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import PolicyObjective, ValueObjective

P, R = 6, 7
FP64 = FSDPConfig(model_dtype="fp64", mixed_precision=MixedPrecisionConfig(reduce_dtype="fp64"))
ROWS = MicroBatchRule(rows=4)
SPLIT_BYTES = 80_000  # of the optimizer's state that stay on the device: a part of it


def build(
    folder: str, fsdp: FSDPConfig = FP64, strategy: str = "fsdp2", lr: float = 1e-2, model: Any = None, **options: Any
) -> Engine:
    chosen = ModelConfig(path=folder, **(model or {}))
    optim = OptimConfig(lr=lr, lr_warmup_steps=2, lr_scheduler_type="cosine")
    defaults = {"optim": optim, "total_steps": 10, "grad_clip": 1e9, "device": torch.device("cpu")}
    return Engine(chosen, fsdp, strategy=strategy, **(defaults | options))


def make_batch(rows: int = 8, seed: int = 0) -> Batch:
    """Ragged prompts and responses, among them a full row, an empty response and one with two gaps in its response mask."""
    g = torch.Generator().manual_seed(seed)
    prompts, responses = (torch.randint(1, n + 1, (rows, 1), generator=g) for n in (P, R))
    prompts[0], responses[0] = P, R
    if rows > 2:
        responses[2] = 0
    mask = torch.cat([torch.arange(P) >= P - prompts, torch.arange(R) < responses], dim=1)
    response_mask = mask[:, P:].clone()
    response_mask[0, [2, 3, 5]] = False
    noise = {name: torch.randn(rows, R, generator=g, dtype=torch.float64) for name in ("a", "o", "r", "v", "t")}
    return Batch.of(
        {
            "input_ids": torch.randint(3, 250, (rows, P + R), generator=g).masked_fill(~mask, 0),
            **{"attention_mask": mask, "response_mask": response_mask, "advantages": noise["a"]},
            **{"old_log_probs": -5.5 + 0.3 * noise["o"], "ref_log_probs": -5.5 + 0.3 * noise["r"]},
            **{"values": 0.3 * noise["v"], "returns": noise["t"]},
            "rollout_is_weights": noise["v"].exp().clamp(max=2.0) * response_mask,
            "loss_mask": response_mask & (noise["t"].abs() < 1) & (torch.arange(rows) != rows - 1)[:, None],
        }
    )


@contextmanager
def norms_in_fp64() -> Iterator[None]:
    """Let the model's norms compute in fp64, which round to fp32 otherwise.

    Gradients of several rows reach a norm as one sum if the rows share its token. So rounding would not be the same.
    """
    rounding = Qwen3RMSNorm.forward

    def forward(self: Qwen3RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    Qwen3RMSNorm.forward = forward
    try:
        yield
    finally:
        Qwen3RMSNorm.forward = rounding


def grouped(batch: Batch) -> Batch:
    """Give rows prompts in common: groups of 3, 2, 1 and 2, one of them with two responses that begin alike."""
    ids, mask = batch["input_ids"].clone(), batch["attention_mask"].clone()
    first = [0, 0, 0, 3, 3, 5, 6, 6]
    ids[:, :P], mask[:, :P] = ids[first, :P], mask[first, :P]
    ids[1, P : P + 3] = ids[0, P : P + 3]
    return batch.with_(input_ids=ids.masked_fill(~mask, 0), attention_mask=mask)


def two_groups(responses: Sequence[int]) -> Batch:
    """Two groups of four rows with full prompts and these lengths of responses, which begin differently."""
    batch = make_batch()
    mask = torch.ones_like(batch["attention_mask"])
    mask[:, P:] = torch.arange(R) < torch.tensor(responses)[:, None]
    ids = torch.randint(3, 250, mask.shape, generator=torch.Generator().manual_seed(0))
    ids[:, :P], ids[:, P] = ids[[0] * 4 + [4] * 4, :P], torch.arange(8) + 3
    group = torch.tensor([0] * 4 + [1] * 4)
    return batch.with_(
        input_ids=ids.masked_fill(~mask, 0), attention_mask=mask, response_mask=mask[:, P:].clone(), group_id=group
    )


def policy(mode: str = "token-mean", **options: Any) -> PolicyObjective:
    actor = ActorConfig(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.05, **options)
    return PolicyObjective(actor, temperature=0.7, horizon=R)


def corrected(mode: str = "token-mean", **options: Any) -> PolicyObjective:
    """With weights and rejected tokens, and the old log-probs compared as the sampler's."""
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs=("token_k1",), bypass_mode=True)
    return PolicyObjective(policy(mode, **options).actor, temperature=0.7, horizon=R, correction=correction)


def value(mode: str = "token-mean") -> ValueObjective:
    return ValueObjective(CriticConfig(loss_agg_mode=mode), horizon=R)


def own_share(batch: Batch, sizes: Sequence[int], together: int = 1) -> Batch:
    """This rank's contiguous share, which `together` neighbours have alike."""
    number = dist.get_rank() // together
    first = sum(sizes[:number])
    return batch.rows(range(first, first + sizes[number]))


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(engine.weights.full())


class Gradients:
    """Keeps the full gradients that each optimizer step sees, flattened in the order of their names."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.seen: list[torch.Tensor] = []
        engine.stepper.optimizer.register_step_pre_hook(lambda *_: self.seen.append(self.now()))

    def now(self) -> torch.Tensor:
        root = self.engine.root
        if isinstance(root, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(root, with_grads=True, writeback=False):
                found = {
                    name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in root.named_parameters()
                }
        else:
            grads = {name: p.grad for name, p in root.named_parameters() if p.requires_grad}
            found = {n: whole(g) if isinstance(g, DTensor) else g.clone() for n, g in grads.items()}
        return torch.cat([found[name].flatten() for name in sorted(found)])
