"""From a batch of prompts to the rows of conversations, and from conversations to a batch. Letters as in `rlx/data/batch.py`."""

from collections.abc import Sequence
from typing import Any

import torch

from rlx.data.batch import Batch, BatchError, left_padded
from rlx.environments.conversation import Conversation
from rlx.environments.running import ConversationRow, RanConversations

ROW_INFO = ("raw_prompt", "data_source", "ground_truth", "extra_info")
"""The entries of a batch's info that an environment's `reset` gets; raw_prompt as `prompt`."""


def rows_of(batch: Batch) -> list[ConversationRow]:
    """Return the rows of a batch with prompt_ids, prompt_mask, seed and info ROW_INFO. Raises BatchError."""
    missing = [name for name in ROW_INFO if name not in batch.info]
    if missing and len(batch):
        raise BatchError(f"the data set gives no info {missing}, expected {list(ROW_INFO)} for environments")
    rows = []
    for index in range(len(batch)):
        data: dict[str, Any] = {name.removeprefix("raw_"): batch.info[name][index] for name in ROW_INFO}
        if isinstance(data["prompt"], str):
            data["prompt"] = [{"role": "user", "content": data["prompt"]}]
        seed = int(batch["seed"][index])
        prompt = batch["prompt_ids"][index][batch["prompt_mask"][index]].tolist()
        rows.append(ConversationRow(data | {"seed": seed}, seed, prompt))
    return rows


def batch_of(
    ran: RanConversations,
    rows: Sequence[ConversationRow],
    pad_token_id: int,
    response_length: int,
    version: int | None,
    with_log_probs: bool,
) -> Batch:
    """Return the conversations as a batch.

    Returns:
        seed, input_ids, attention_mask, response_mask (True on sampled tokens alone), policy_version, turn_rewards, with log-probs
        rollout_log_probs; and info conversation. A conversation without a prompt of its own has that of its row.
    """
    conversations = ran.conversations
    prompts = [own.prompt_ids or row.prompt_ids for own, row in zip(conversations, rows, strict=True)]
    prompt_ids, prompt_mask = (
        left_padded(prompts, pad_token_id) if prompts else (torch.zeros(0, 1, dtype=torch.int64),) * 2
    )
    responses = _right_padded([own.token_ids for own in conversations], response_length, pad_token_id, torch.int64)
    written = _right_padded([[True] * len(own.token_ids) for own in conversations], response_length, False, torch.bool)
    count = len(conversations)
    batch = Batch.of(
        {
            "seed": torch.tensor([row.seed for row in rows], dtype=torch.int64),
            "input_ids": torch.cat([prompt_ids, responses], dim=1),
            "attention_mask": torch.cat([prompt_mask.bool(), written], dim=1),
            "response_mask": _right_padded([own.sampled for own in conversations], response_length, False, torch.bool),
            "policy_version": torch.full((count,), version or 0, dtype=torch.int64),
            "turn_rewards": _right_padded(
                [_rewards(own) for own in conversations], response_length, 0.0, torch.float32
            ),
        },
        {"conversation": [_record(own, ran.waited_s) for own in conversations]},
    )
    if not with_log_probs:
        return batch
    log_probs = _right_padded([own.log_probs for own in conversations], response_length, 0.0, torch.float32)
    return batch.with_(rollout_log_probs=log_probs)


def _right_padded(rows: Sequence[Sequence[float]], width: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
    padded = torch.full((len(rows), width), padding, dtype=dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=dtype)
    return padded


def _rewards(conversation: Conversation) -> list[float]:
    """Return the reward of each token: that of a turn on its last one."""
    rewards = [0.0] * len(conversation.token_ids)
    for turn in conversation.own_turns:
        rewards[turn["end"] - len(conversation.prompt_ids) - 1] = float(turn["reward"] or 0.0)
    return rewards


def _record(conversation: Conversation, waited_s: float) -> dict[str, Any]:
    """Return the parts of a conversation that are no tensor; see INFO in `rlx/data/batch.py`."""
    return {
        "turns": conversation.turns,
        "reason": conversation.reason,
        "failed": conversation.failed,
        "reward": conversation.reward,
        "info": conversation.info,
        "waited_s": waited_s,
    }
