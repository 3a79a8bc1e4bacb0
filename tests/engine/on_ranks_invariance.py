"""Gradients as the engine computes them, and as the formulas say."""

import torch
from rank_tools import Gradients, build, corrected, make_batch, own_share, policy, value

from rlx.algorithms.aggregation import denominator, token_weights
from rlx.algorithms.kl import kl_estimate
from rlx.algorithms.losses import policy_loss, value_loss
from rlx.config.schema import AGGREGATIONS, ModelConfig
from rlx.models.loading import load_model

OBJECTIVES = {"policy": policy, "corrected": corrected, "value": value}
HEADS = {"policy": "lm", "corrected": "lm", "value": "value"}


def cut_gradients(folder, kind, strategy, cases):
    """For each mode and case (shares, cut) the gradient and the metrics, from one engine that stays where it is."""
    engine = build(folder, strategy=strategy, head=HEADS[kind], lr=0.0)
    gradients = Gradients(engine)
    metrics = []
    for mode in AGGREGATIONS:
        for shares, cut in cases:
            metrics.append(engine.update(own_share(make_batch(), shares), cut, OBJECTIVES[kind](mode)))
    return torch.stack(gradients.seen), metrics


def naive(folder, kind):
    """The same by the formulas: each row alone, whole and without padding, through the plain model."""
    batch, head = make_batch(), HEADS[kind]
    model = load_model(ModelConfig(path=folder), head, torch.float64)
    mask, width = batch["loss_mask" if kind == "corrected" else "response_mask"], batch.response_length
    outputs = torch.zeros(3, *mask.shape, dtype=torch.float64)
    for row, (ids, real) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        length = int(real[-width:].sum())
        logits = model(input_ids=ids[real][None]).logits[0, : int(real.sum()) - 1][-length:] if length else None
        if length and head == "lm":
            every = (logits / 0.7).log_softmax(-1)
            outputs[0, row, :length] = every.gather(-1, batch.responses()[row, :length, None])[:, 0]
            outputs[1, row, :length] = -(every.exp() * every).sum(-1)
        elif length:
            outputs[2, row, :length] = logits[:, 0]
    log_probs, entropy, values = outputs
    if head == "lm":
        loss, _ = policy_loss(log_probs, batch["old_log_probs"], batch["advantages"], 0.2, 0.2, 3.0)
        loss = loss * batch["rollout_is_weights"] if kind == "corrected" else loss
        loss = loss - 0.05 * entropy + 0.1 * kl_estimate(log_probs, batch["ref_log_probs"], "k3")
    else:
        loss, _ = value_loss(values, batch["values"], batch["returns"], 0.5)
    found = []
    for mode in AGGREGATIONS:
        total = (token_weights(mask, mode, width, torch.float64) * loss).sum() / denominator(mask, mode)
        _, parameters = zip(*sorted(model.named_parameters()), strict=True)
        found.append(
            (total.item(), torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters, retain_graph=True)]))
        )
    return found
