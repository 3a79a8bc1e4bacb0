"""Figures of a model by transformers alone: each row in a forward of its own, without padding, and one step of AdamW by formula.

Shape letters as in `rlx/data/batch.py`: B rows, P prompt tokens, R response tokens, T = P + R.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlx.algorithms.losses import denominator
from rlx.config.schema import ActorConfig, CriticConfig, OptimConfig
from rlx.config.schema.training import RouterReplayConfig
from rlx.data.batch import Batch
from rlx.engine.objectives import Objective, PolicyObjective, Totals, ValueObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

P, R = 8, 9
PROMPTS, RESPONSES = (8, 3, 5, 1, 6), (9, 4, 7, 5, 2)
TEMPERATURE = 0.7
# With this epsilon a step is a smooth function of the gradient, so that the change of the weights tells the gradient.
OPTIM = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0)
GRAD_CLIP = 1e9
TOLERANCE = 1e-3  # largest error of a right outcome


def policy_objective(replay: str = "disabled") -> PolicyObjective:
    """Return a policy loss that reads log-probs and entropies."""
    actor = ActorConfig(
        use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.05, router_replay=RouterReplayConfig(replay)
    )
    return PolicyObjective(actor, temperature=TEMPERATURE, horizon=R)


def value_objective() -> ValueObjective:
    """Return the loss of values."""
    return ValueObjective(CriticConfig(loss_agg_mode="token-mean"), horizon=R)


def sweep_batch(vocabulary: int) -> Batch:
    """Return five rows of different lengths."""
    g = torch.Generator().manual_seed(0)
    prompts, responses = (torch.tensor(each)[:, None] for each in (PROMPTS, RESPONSES))
    mask = torch.cat([torch.arange(P) >= P - prompts, torch.arange(R) < responses], dim=1)
    ids = torch.randint(3, vocabulary, mask.shape, generator=g).masked_fill(~mask, 0)
    noise = {name: torch.randn(responses.shape[0], R, generator=g, dtype=torch.float64) for name in "aorvt"}
    return Batch.of(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "response_mask": mask[:, P:],
            "advantages": noise["a"],
            "old_log_probs": -4 + 0.3 * noise["o"],
            "ref_log_probs": -4 + 0.3 * noise["r"],
            "values": 0.3 * noise["v"],
            "returns": noise["t"],
        }
    )


class Expected(NamedTuple):
    """Figures of the responses (B, R) by name, and the gradient of each parameter by its name."""

    figures: dict[str, Tensor]
    gradients: dict[str, Tensor]


def expected(model: "PreTrainedModel", batch: Batch, objective: Objective) -> Expected:
    """Return the figures and gradients of a model, by a forward for each row."""
    figures = figures_of(model, batch, policy=objective.distribution is not None)
    mask_BR = objective.mask(batch)
    totals = Totals(float(denominator(mask_BR, objective.loss_agg_mode)), float(mask_BR.sum()))
    objective.share(figures, batch, totals).loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return Expected({name: x.detach() for name, x in figures.items()}, gradients)


def figures_of(model: "PreTrainedModel", batch: Batch, policy: bool = True) -> dict[str, Tensor]:
    """Return log_probs and entropy, or values, of a model's responses (B, R); 0 on padding."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        own, response = ids[mask], int(mask[P:].sum())
        logits = logits_of(model, own)[-1 - response : -1]
        if policy:
            every = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / TEMPERATURE).log_softmax(-1)
            chosen = every.gather(-1, own[-response:, None])[:, 0]
            row = {"log_probs": chosen, "entropy": -(every.exp() * every).sum(-1)}
        else:
            row = {"values": logits[:, 0]}
        rows.append({name: torch.nn.functional.pad(x, (0, R - response)) for name, x in row.items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def logits_of(model: "PreTrainedModel", ids: Tensor) -> Tensor:
    """Return the logits (T, V) of one sequence. Without a mask some models would attend to later tokens with eager attention."""
    mask = {"attention_mask": torch.ones_like(ids[None])}
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    logits: Tensor = model(input_ids=ids[None], use_cache=False, **(mask if takes_mask else {})).logits[0]
    return logits


def step_of(gradient: Tensor) -> Tensor:
    """Return the change of a weight in AdamW's first step."""
    return -OPTIM.lr * gradient / (gradient.abs() + OPTIM.eps)


def lora_change(gradient: Tensor, a: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return the change of a merged weight in the first step of its adapter, whose B is 0 before.

    Args:
        gradient: of the weight.
        a: (rank, in) of the adapter.
        scale: of the product B A.
        transposed: whether the weight is (in, out).
    """
    of_weight = gradient.T if transposed else gradient
    change = scale * step_of(scale * of_weight @ a.T) @ a
    return change.T if transposed else change


def largest_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two sets of changes, each as a share of the largest change of its tensor.

    Tensors that hardly change count as if they changed by 1 % of the largest change of all.
    """
    most = max(float(x.abs().max()) for x in wanted.values() if x.numel())
    shares = [
        (found[name].to(x.dtype) - x).abs().max() / max(float(x.abs().max()), 1e-2 * most, 1e-30)
        for name, x in wanted.items()
        if x.numel()
    ]
    return float(torch.stack([share.double() for share in shares]).max())  # NaN if one is
