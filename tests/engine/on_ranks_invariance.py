"""Gradients as the engine computes them, and as the formulas say."""

import itertools
from functools import partial
from typing import NamedTuple

import torch
from rank_tools import (
    Gradients,
    build,
    corrected,
    grouped,
    make_batch,
    norms_in_fp64,
    own_share,
    policy,
    two_groups,
    value,
)

from rlx.algorithms.kl import kl_estimate
from rlx.algorithms.losses import POLICY_LOSSES, LossSettings, denominator, token_weights, value_loss
from rlx.config.schema import AGGREGATIONS, ActivationOffloadConfig, ModelConfig, PolicyLossConfig
from rlx.data.batch import Batch
from rlx.engine.micro_batches import MicroBatchRule
from rlx.models.loading import load_model
from rlx.trainer.environment_rows import with_sample_tokens
from rlx.trainer.learning import balanced


class Kind(NamedTuple):
    """An objective, by the mode of aggregation; what its model ends in, and the policy loss in it."""

    objective: object
    head: str = "lm"
    loss: str = "vanilla"


def of_loss(objective, loss):
    return Kind(partial(objective, policy_loss=PolicyLossConfig(loss_mode=loss)), loss=loss)


# One of the sequence-level losses sees only what rejections leave of its sequences.
KINDS = {
    "policy": Kind(policy),
    "corrected": Kind(corrected),
    "value": Kind(value, head="value"),
    "cispo": of_loss(policy, "cispo"),
    "geo_mean": of_loss(policy, "geo_mean"),
    "gspo": of_loss(corrected, "gspo"),
    "sapo": of_loss(policy, "sapo"),
}
CORRECTED = ("corrected", "gspo")
CONVERSATION_OF_ROW = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
"""Of a batch in which conversations have several rows."""


def changed(batch, change):
    """The same samples in another order, or padded further, where columns hold numbers that must not be read."""
    if change == "reordered":
        return batch.rows([5, 2, 7, 0, 3, 6, 1, 4])
    if change is None:
        return batch
    left, right = (3, 0) if change == "left" else (0, 2)

    def pad(name, column):
        window = name not in ("input_ids", "attention_mask")
        filler = False if column.dtype == torch.bool else 7
        return torch.nn.functional.pad(column, (0 if window else left, right), value=filler)

    return Batch.of({name: pad(name, column) for name, column in batch.tensors.items()})


def forked(batch, kind):
    """The batch with the rows of four conversations."""
    branch = torch.tensor([0, 1, 2, 0, 1, 0, 0, 1])
    batch = batch.with_({"sample": [0] * 8}, group_id=CONVERSATION_OF_ROW, branch=branch)
    return with_sample_tokens(batch, "loss_mask" if kind in CORRECTED else "response_mask")


def cut_gradients(folder, kinds, strategy, cases, together=1, offload=None, shares=None, forks=False):
    """The gradients and the metrics of kinds, modes and cases (shares, cut, change), from one engine that stays where it is.

    With FSDP2 each case is computed in every mode; with FSDP1 in one, the modes taking turns: a mode only decides which
    number a micro-batch's backward starts from, and what shards the model is not told of it.

    Returns:
        gradients, metrics, and for each which entry of `naive` it must equal.
    """
    model = {} if shares is None else {"use_shared_prefix": shares}
    if offload:
        options = ActivationOffloadConfig(save=offload, min_bytes=0)
        model |= {"enable_activation_offload": True, "activation_offload": options}
    head = KINDS[kinds[0]].head
    engine = build(folder, strategy=strategy, head=head, lr=0.0, model=model, sequence_parallel=together)
    gradients = Gradients(engine)
    metrics, equal = [], []
    for number, (kind, mode) in enumerate(itertools.product(kinds, AGGREGATIONS)):
        step = 1 if strategy == "fsdp2" else len(AGGREGATIONS)
        for rows, cut, change in cases[number % step :: step]:
            whole = make_batch() if shares is None else grouped(make_batch())
            whole = forked(whole, kind) if forks else whole
            batch = own_share(changed(whole, change), rows, together)
            metrics.append(engine.update(batch, cut, KINDS[kind].objective(mode)))
            equal.append(number)
    return torch.stack(gradients.seen), metrics, equal


def grouped_gradients(folder, kinds, strategy, cases, together, offload, shares, forks=False):
    """`cut_gradients` of groups that share their prompts."""
    with norms_in_fp64():
        return cut_gradients(folder, kinds, strategy, cases, together, offload, shares, forks)


def naive_of_groups(folder, kinds):
    """`naive` of groups that share their prompts."""
    with norms_in_fp64():
        return naive(folder, kinds, grouped(make_batch()))


def naive_of_conversations(folder, kinds):
    """`naive` of groups that share their prompts and of which conversations have several rows."""
    with norms_in_fp64():
        return naive(folder, kinds, grouped(make_batch()), of_conversations)


def of_conversations(loss, mask):
    """The mean over tokens, and those over conversations of sums, of means and of sums by the horizon."""
    sums, tokens = (
        torch.zeros(4, dtype=loss.dtype).index_add(0, CONVERSATION_OF_ROW, x.sum(dim=1))
        for x in (loss * mask, mask.to(loss.dtype))
    )
    count = (tokens > 0).sum()
    by_mode = {
        "token-mean": sums.sum() / tokens.sum(),
        "seq-mean-token-sum": sums.sum() / count,
        "seq-mean-token-mean": (sums / tokens.clamp(min=1)).sum() / count,
        "seq-mean-token-sum-norm": sums.sum() / count / mask.shape[1],
    }
    return [by_mode[mode] for mode in AGGREGATIONS]


def of_rows(loss, mask):
    """The losses of all modes, in which each row is a sample."""
    weights = (token_weights(mask, mode, mask.shape[1], torch.float64) for mode in AGGREGATIONS)
    return [(own * loss).sum() / denominator(mask, mode) for own, mode in zip(weights, AGGREGATIONS, strict=True)]


def dealt_groups(folder, responses):
    """The gradient of two groups of four rows that are dealt to two processes, the formula's, and the share of tokens saved."""
    with norms_in_fp64():
        batch = two_groups(responses)
        chosen = {"use_shared_prefix": True}
        engine = build(folder, lr=0.0, model=chosen)
        gradients = Gradients(engine)
        mixed = batch.rows([5, 2, 7, 0, 3, 6, 1, 4])
        dealt = mixed.rows(balanced(mixed, 2, ModelConfig(path=folder, **chosen).least_gain))
        metrics = engine.update(own_share(dealt, (4, 4)), MicroBatchRule(rows=8), policy())
        return gradients.seen[0], naive(folder, ("policy",), batch)[0][1], metrics["tokens_saved"]


def several(calls):
    """The results of several calls of `cut_gradients`."""
    return [cut_gradients(*call) for call in calls]


def naive(folder, kinds, batch=None, aggregate=of_rows):
    """The same by the formulas: each row alone, whole and without padding, through the plain model."""
    batch, head = batch or make_batch(), KINDS[kinds[0]].head
    model = load_model(ModelConfig(path=folder), head, torch.float64)
    width = batch.response_length
    outputs = torch.zeros(3, *batch["response_mask"].shape, dtype=torch.float64)
    for row, (ids, real) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        length = int(real[-width:].sum())
        logits = model(input_ids=ids[real][None]).logits[0, : int(real.sum()) - 1][-length:] if length else None
        if length and head == "lm":
            every = (logits / 0.7).log_softmax(-1)
            outputs[0, row, :length] = every.gather(-1, batch.responses()[row, :length, None])[:, 0]
            outputs[1, row, :length] = -(every.exp() * every).sum(-1)
        elif length:
            outputs[2, row, :length] = logits[:, 0]
    return [found for kind in kinds for found in of_kind(kind, batch, outputs, model, aggregate)]


def of_kind(kind, batch, outputs, model, aggregate):
    """Loss and gradient in each mode."""
    log_probs, entropy, values = outputs
    mask = batch["loss_mask" if kind in CORRECTED else "response_mask"]
    if KINDS[kind].head == "lm":
        function, settings = POLICY_LOSSES[KINDS[kind].loss], LossSettings(0.2, 0.2)
        loss, _ = function(log_probs, batch["old_log_probs"], batch["advantages"], mask, settings)
        loss = loss * batch["rollout_is_weights"] if kind in CORRECTED else loss
        loss = loss - 0.05 * entropy + 0.1 * kl_estimate(log_probs, batch["ref_log_probs"], "k3")
    else:
        loss, _ = value_loss(values, batch["values"], batch["returns"], 0.5)
    found = []
    for total in aggregate(loss, mask):
        _, parameters = zip(*sorted(model.named_parameters()), strict=True)
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        found.append((total.item(), torch.cat([g.flatten() for g in gradients])))
    return found
