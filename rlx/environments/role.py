"""The environments of a process that samples, as the configuration names them."""

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from rlx.config.schema import PPOConfig
from rlx.data.batch import Batch
from rlx.environments.chat import Chat, UnusableTemplate
from rlx.environments.conversation import Conversation
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.rows import batch_of, rows_of
from rlx.environments.running import ConversationBounds, ConversationOptions, run_conversations
from rlx.environments.spec import environment_spec
from rlx.rollout.protocol import FirstRank, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def bounds(config: PPOConfig) -> ConversationBounds:
    """Return the limits of conversations."""
    own, turns = config.environment, config.actor_rollout_ref.rollout.multi_turn
    return ConversationBounds(
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.data.max_response_length,
        turn_tokens=turns.max_turn_tokens,
        turns=turns.max_assistant_turns,
        answers=turns.max_user_turns,
        tool_characters=turns.max_tool_response_length,
        cut_side=turns.tool_response_truncate_side,
        open=own.max_parallel,
        failure_reward=own.failure_reward,
        ends_run=own.on_failure == "end_run",
    )


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
        self._pool = None
        if first_rank.is_this:
            self._pool = EnvironmentPool(environment_spec(config), own.processes, own.memory_limit_gb)
        self._options = partial(
            ConversationOptions,
            chat=self._chat,
            bounds=bounds(config),
            first_rank=first_rank,
            in_waves=rollout.name == "hf",  # which decodes waves of requests; vLLM takes them at any time
        )

    def generate(self, rollout: Rollout, batch: Batch, sampling: Sampling) -> Batch:
        """Run a conversation for each row.

        Args:
            rollout: with weights.
            batch: as `rows_of` takes it.
            sampling: of turns.

        Returns:
            As `batch_of`; prompts are as wide as the longest of this batch.

        Raises:
            EnvironmentFailed, EngineError: see `run_conversations`.
        """
        rows = rows_of(batch)
        options = self._options(sampling=sampling)
        ran = run_conversations(rollout, self._pool, rows, options)
        self._tell_hidden_tools(ran.conversations)
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
