"""Generate samples for a batch of prompts: the adapter between the batch layout and single requests."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rlx.data.batch import Batch, BatchError
from rlx.rollout.protocol import Completion, Request, Rollout, Sampling


def generate_batch(
    rollout: Rollout, batch: Batch, sampling: Sampling, pad_token_id: int, response_length: int
) -> Batch:
    """Complete each row once.

    Args:
        rollout: the sampler; it has received weights.
        batch: with prompt_ids, prompt_mask and seed; other columns and info are kept.
        sampling: the same for every row; max_tokens is at most `response_length`.
        pad_token_id: fills responses on the right.
        response_length: R, the width of the response columns [tokens]; equal for batches that are to be joined.

    Returns:
        The batch with input_ids, attention_mask, response_mask, policy_version and, if `sampling` asks for them,
        rollout_log_probs and routed_experts, instead of prompt_ids and prompt_mask. A batch without rows gives one without rows.

    Raises:
        ValueError: max_tokens exceeds `response_length`.
        BatchError: a column is missing or a prompt is empty.
    """
    if sampling.max_tokens > response_length:
        raise ValueError(
            f"max_tokens: got {sampling.max_tokens}, expected at most {response_length}, the width of the response columns"
        )
    prompts, masks, seeds = batch["prompt_ids"], batch["prompt_mask"], batch["seed"]
    empty = (~masks.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise BatchError(f"row {empty[0]} has an empty prompt; expected at least one token")
    # Lists and arrays of the whole batch; row by row this would take as long as several steps of decoding.
    starts = (prompts.shape[1] - masks.sum(dim=1)).tolist()
    requests = [
        Request(tuple(ids[start:]), seed, sampling)
        for ids, start, seed in zip(prompts.tolist(), starts, seeds.tolist(), strict=True)
    ]
    completions = rollout.generate(requests)
    responses, response_mask = _padded(completions, pad_token_id, response_length)
    samples = batch.drop("prompt_ids", "prompt_mask").with_(
        input_ids=torch.cat([prompts, responses], dim=1),
        attention_mask=torch.cat([masks, response_mask], dim=1),
        response_mask=response_mask,
        policy_version=torch.full((len(batch),), rollout.version, dtype=torch.int64),
    )
    if sampling.with_experts and len(batch):
        experts = [completion.experts for completion in completions]
        samples = samples.with_(routed_experts=_placed(experts, starts, samples["input_ids"].shape[1]))
    if not sampling.with_log_probs:
        return samples
    log_probs = torch.zeros(response_mask.shape)
    log_probs[response_mask] = _joined([c.log_probs or () for c in completions], np.float32)
    return samples.with_(rollout_log_probs=log_probs)


def _padded(completions: list[Completion], pad_token_id: int, width: int) -> tuple[Tensor, Tensor]:
    """Return tokens and mask, each (B, width)."""
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int64)
    mask = torch.arange(width) < lengths[:, None]
    responses = torch.full(mask.shape, pad_token_id, dtype=torch.int64)
    responses[mask] = _joined([completion.token_ids for completion in completions], np.int64)
    return responses, mask


def _placed(experts: Sequence[Tensor | None], starts: Sequence[int], width: int) -> Tensor:
    """Return the experts of all rows, each from its first prompt token on, (B, width, L, K)."""
    first = experts[0]
    assert first is not None
    placed = torch.zeros(len(experts), width, *first.shape[1:], dtype=first.dtype)
    for row, (own, start) in enumerate(zip(experts, starts, strict=True)):
        assert own is not None
        placed[row, start : start + len(own)] = own
    return placed


def _joined(lists: Sequence[Sequence[float]], kind: "type[np.number]") -> Tensor:
    """Return the numbers of all lists in one tensor."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), kind))
