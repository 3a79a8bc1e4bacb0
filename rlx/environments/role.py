"""The environments of a process that samples: from a batch of prompts to conversations and back. Letters as in `rlx/data/batch.py`."""

import logging
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlx.config.schema import PPOConfig
from rlx.data.batch import Batch, BatchError, left_padded, right_padded
from rlx.environments.chat import Chat, UnusableTemplate
from rlx.environments.conversation import Branch, Conversation
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.running import ConversationBounds, ConversationOptions, ConversationRow, Run
from rlx.environments.spec import environment_spec
from rlx.rollout.protocol import FirstRank, PrefixMemory, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROW_INFO = ("raw_prompt", "data_source", "ground_truth", "extra_info")
"""The entries of a batch's info that an environment's `reset` gets; raw_prompt as `prompt`."""


def require_usable_template(config: PPOConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise UnusableTemplate if the chat template lets no conversation continue, neither by a user's messages nor by tools' output."""
    chat = Chat(tokenizer, config.actor_rollout_ref.rollout.multi_turn.on_rewritten_history)
    faults = [chat.fault_of(role) for role in ("user", "tool")]
    if all(faults):
        raise UnusableTemplate(
            f"the chat template of {config.actor_rollout_ref.model.path} allows no second turn; after a user's message: {faults[0]}; "
            f"after a tool's output: {faults[1]}"
        )


class ConversationSampler:
    """Samples conversations of a batch; its environments live in processes of their own, which end with this one.

    All processes of the run build theirs together.
    """

    def __init__(self, config: PPOConfig, tokenizer: "PreTrainedTokenizerBase"):
        rollout, own = config.actor_rollout_ref.rollout, config.environment
        self._pad_token_id = int(tokenizer.pad_token_id)
        first_rank = FirstRank(rollout.tensor_model_parallel_size)
        self._chat = Chat(tokenizer, rollout.multi_turn.on_rewritten_history)
        # Calls of the calculator are demonstrated to the tiny model, whose template shows no tools.
        self._may_hide_tools = own.path is not None or own.name != "calculator"
        self._pool, spec, self._kind = None, environment_spec(config), Run
        limits = (spec, own.processes, own.memory_limit_gb)
        if spec.has_agents:
            from rlx.environments.endpoint_pool import AgentPool
            from rlx.environments.endpoint_run import AgentRun

            self._kind = AgentRun
            self._pool = AgentPool(*limits, rollout.multi_turn.on_rewritten_history) if first_rank.is_this else None
        elif first_rank.is_this:
            self._pool = EnvironmentPool(*limits)
        lengths = config.data.max_prompt_length, config.data.max_response_length
        self._options = partial(
            ConversationOptions,
            chat=self._chat,
            bounds=ConversationBounds(*lengths, rollout.multi_turn, own),
            first_rank=first_rank,
            in_waves=rollout.name == "hf",  # which decodes waves of requests; vLLM takes them at any time
        )

    def generate(
        self, rollout: Rollout, batch: Batch, sampling: Sampling, done: dict[int, Conversation] | None = None
    ) -> Batch:
        """Run a conversation for each of `rows_of(batch)` and return `batch_of` them. Raises as `Run`.

        A batch with info `kept`, conversations, has a budget of each; return seed and `kept` then.
        """
        rows = rows_of(batch)
        options = self._options(sampling=sampling)
        ran = self._kind(rollout, self._pool, rows, options, done).to_the_end()
        self._tell_hidden_tools(ran)
        if "kept" in batch.info:
            for own in ran:
                own.memory = PrefixMemory()
                own.stamp(rollout.version or 0)
            return batch.select("seed").with_({"kept": ran})
        width, version = options.bounds.response_tokens, rollout.version
        return batch_of(ran, rows, self._pad_token_id, width, version, sampling.with_log_probs)

    def _tell_hidden_tools(self, conversations: Iterable[Conversation]) -> None:
        """Warn once if the model cannot know of the environment's tools."""
        tools = next((each.tools for each in conversations if each.tools), [])
        if not self._may_hide_tools or not tools:
            return
        self._may_hide_tools = False
        if not self._chat.shows(tools):
            logger.warning(
                "no chat template shows the model its tools (%s): unless the prompts describe them it will hardly call them; or take a model "
                "whose template writes their schemas",
                ", ".join(str(tool.get("function", tool).get("name")) for tool in tools),
            )


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
        kept, budget = (batch.info["kept"][index], int(batch["budget"][index])) if "kept" in batch.info else (None, 0)
        rows.append(ConversationRow(data | {"seed": seed}, seed, prompt, kept, budget))
    return rows


def batch_of(
    ran: Sequence[Conversation],
    rows: Sequence[ConversationRow],
    pad_token_id: int,
    response_length: int,
    version: int | None,
    with_log_probs: bool,
) -> Batch:
    """Return the conversations as a batch, a row for each: its last branch; the others are in info earlier_rows.

    A conversation without a prompt of its own has that of its row.
    """
    shape = pad_token_id, response_length, version or 0, with_log_probs
    last, earlier = [], []
    for own, row in zip(ran, rows, strict=True):
        branches = [each._replace(prompt_ids=each.prompt_ids or row.prompt_ids) for each in own.branches]
        *before, written = zip([row.seed] * len(branches), branches, _rewards(own), strict=True)
        last.append(written)
        earlier.append(_columns(before, *shape) if own.earlier else None)
    return _columns(last, *shape).with_({"conversation": [*map(_record, ran)], "earlier_rows": earlier})


def _columns(
    rows: Sequence[tuple[int, Branch, list[float]]], pad_token_id: int, width: int, version: int, with_log_probs: bool
) -> Batch:
    """Return columns of rows: the seed of each, its branch, and the rewards of its tokens."""
    seeds, branches, rewards = zip(*rows, strict=True) if rows else ((), (), ())
    none = (torch.zeros(0, 1, dtype=torch.int64),) * 2
    prompt_ids, prompt_mask = left_padded([own.prompt_ids for own in branches], pad_token_id) if rows else none
    responses, written = right_padded([own.token_ids for own in branches], width, torch.int64, pad_token_id)
    sampled, _ = right_padded([own.sampled for own in branches], width, torch.bool)
    versions, _ = right_padded([own.stamped(version) for own in branches], width, torch.int32)
    batch = Batch.of(
        {
            "seed": torch.tensor(seeds, dtype=torch.int64),
            "input_ids": torch.cat([prompt_ids, responses], dim=1),
            "attention_mask": torch.cat([prompt_mask.bool(), written], dim=1),
            "response_mask": sampled,
            "policy_versions": versions * sampled,
            "turn_rewards": right_padded(rewards, width, torch.float32)[0],
        }
    )
    if not with_log_probs:
        return batch
    log_probs, _ = right_padded([own.log_probs for own in branches], width, torch.float32)
    return batch.with_(rollout_log_probs=log_probs)


def _rewards(conversation: Conversation) -> list[list[float]]:
    """Return the reward of each token of each branch: that of a turn on its last one."""
    branches = conversation.branches
    rewards = [[0.0] * len(own.token_ids) for own in branches]
    for turn in conversation.own_turns:
        branch = turn["branch"]
        rewards[branch][turn["end"] - len(branches[branch].prompt_ids) - 1] = float(turn["reward"] or 0.0)
    return rewards


def _record(conversation: Conversation) -> dict[str, Any]:
    """Return the parts of a conversation that are no tensor; see INFO in `rlx/data/batch.py`."""
    return {
        "turns": conversation.turns,
        "reason": conversation.reason,
        "failed": conversation.failed,
        "traceback": sys.intern(conversation.traceback),  # one object, so that thousands of equal ones are pickled once
        "reward": conversation.reward,
        "info": conversation.info,
        "waited_s": conversation.waited_s,
    }
