"""One conversation in tokens: those that the model sampled, and those that the chat template puts between its turns.

A turn's tokens stay as they were sampled; nobody reads them again from text. Pure data: no sampler, no process.
"""

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.environments.protocol import Message, Observation, Turn
from rlx.errors import ExplainedError
from rlx.rollout.protocol import Completion
from rlx.user_code import TEMPLATE_LIMIT_S, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE, SAID, HIDDEN = "rlxPROBE", "rlxSAID", "rlxHIDDEN"
"""Words that stand in texts for others: those of a turn, of a message, and special tokens."""
ANCHOR = "\n"
LARGEST_NUMBER = 1e300
CHARACTERS_PER_TOKEN = 100
"""Longer messages are not tokenised: they cannot fit into the tokens that are left."""

Tools = list[dict[str, Any]]

_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "a", "parameters": {"type": "object", "properties": {}}},
    }
]
_ROLES: dict[str, tuple[Message, Message]] = {
    "user": ({"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}),
    "tool": (
        {"role": "assistant", "content": "b", "tool_calls": [_CALL]},
        {"role": "tool", "content": "c", "name": "f", "tool_call_id": _CALL["id"]},
    ),
}
"""Plain examples of a turn and of an answer to it, by the answer's role."""


class RewrittenHistory(ExplainedError, ValueError):
    """A chat template writes earlier turns in another way once messages follow them."""


class UnusableTemplate(ExplainedError, ValueError):
    """A chat template leaves the content of a message out."""


class Chat:
    """Writes messages in tokens, by the tokenizer's chat template; without one, one content after the other.

    Args:
        tokenizer: of the policy.
        keeps_rewritten: when the template would write earlier turns in another way than before, such as without their
            thinking: keep their tokens and add the new messages' alone. Otherwise `between` raises RewrittenHistory.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", keeps_rewritten: bool = False):
        self._tokenizer, self._keeps = tokenizer, keeps_rewritten
        listed = sorted(filter(None, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, [*listed, HIDDEN])))
        # SentencePiece writes a space before each text; behind a line break it does not.
        first = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0]
        self._anchor_ids = tokenizer.encode(ANCHOR, add_special_tokens=False) if first.startswith("\u2581") else []
        self._end: str | None = None
        self._checked: set[tuple[str, bool]] = set()

    def first(self, messages: list[Message], tools: Tools) -> list[int]:
        """Return the tokens of the first prompt. Raises any error of the template."""
        if self._tokenizer.chat_template is None:
            ids: list[int] = list(self._tokenizer(_contents(messages))["input_ids"])
            return ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids
        return self._apply(messages, tools, tokenize=True, add_generation_prompt=True, return_dict=False)

    def text_of(self, completion: Completion) -> str:
        """Return a turn's text with special tokens, without the token that ended it."""
        ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        # As an array: transformers looks at every entry of a list.
        return self._tokenizer.decode(
            np.asarray(ids, np.int64), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def between(self, history: list[Message], added: list[Message], tools: Tools, last_token: int) -> list[int]:
        """Return the tokens from the end of a turn to the beginning of the next.

        Args:
            history: all messages so far; the last is the turn.
            added: the messages that follow. Special tokens in their texts become plain text.
            tools: schemas that the first prompt had.
            last_token: the last sampled token. If the template closes a turn with it, it is not written twice.

        Raises:
            RewrittenHistory: the template would write `history` in another way; see `keeps_rewritten`.
            UnusableTemplate: the template leaves the content of a message out.
            Exception: any error of the template.
        """
        hidden: list[str] = []
        safe = [self._hide(message, hidden) for message in added]
        if self._tokenizer.chat_template is None:
            return self._ids(_contents(safe) or "\n", hidden)  # something must lie between two turns
        self._require_content(history, safe, tools)
        ids = self._ids(self._tail(history, safe, tools), hidden)
        return ids[1:] if ids[:1] == [last_token] else ids

    def fault_of(self, role: str) -> str:
        """Return why no conversation goes on with messages of this role, user or tool; empty if plain ones do."""
        turn, answer = _ROLES.get(role, _ROLES["user"])
        try:
            self.between([{"role": "user", "content": "a"}, turn], [{**answer, "role": role}], _TOOLS, last_token=-1)
        except Exception as fault:  # templates raise any kind of error
            return f"{type(fault).__name__}: {fault}"
        return ""

    def _tail(self, history: list[Message], added: list[Message], tools: Tools) -> str:
        """Return the text behind the words of the last message of `history`."""
        *earlier, turn = history
        before, after = self._text([*earlier, turn], tools), self._text([*earlier, turn, *added], tools, prompt=True)
        words = before.removesuffix(self._closing())
        if before.endswith(self._closing()) and after.startswith(words):
            return after[len(words) :]
        if self._keeps:
            # What the template writes behind other words of the same turn
            turn = {**turn, "content": PROBE}
            before, after = (
                self._text([*earlier, turn], tools),
                self._text([*earlier, turn, *added], tools, prompt=True),
            )
            calls = before.rpartition(PROBE)[2].removesuffix(self._closing())
            rest = after.rpartition(PROBE)[2]
            if before.count(PROBE) == after.count(PROBE) == 1 and rest.startswith(calls):
                return rest[len(calls) :]
        raise RewrittenHistory(
            "the chat template writes earlier turns in another way once new messages follow, for example without their "
            "thinking; expected one that only adds text. Set actor_rollout_ref.rollout.multi_turn.on_rewritten_history=keep to "
            "go on with the tokens as they were sampled, or take a template that keeps them"
        )

    def _closing(self) -> str:
        """Return the text that the template writes behind the words of a last turn."""
        if self._end is None:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
            text = self._text(messages, [])
            if PROBE not in text:
                raise UnusableTemplate(
                    "the chat template does not write the content of the role assistant, given as text"
                )
            self._end = text.rpartition(PROBE)[2]
        return self._end

    def _require_content(self, history: list[Message], added: list[Message], tools: Tools) -> None:
        """Raise UnusableTemplate if the template does not write what a role says, the first time that it comes."""
        kind = (str(added[0].get("role")), "tool_calls" in history[-1])
        if kind not in self._checked:
            if SAID not in self._tail(history, [{**added[0], "content": SAID}], tools):
                raise UnusableTemplate(
                    f"the chat template does not write the content of the role {kind[0]}, given as text"
                )
            self._checked.add(kind)

    def _text(self, messages: list[Message], tools: Tools, prompt: bool = False) -> str:
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt)

    def _apply(self, messages: list[Message], tools: Tools, **options: Any) -> Any:
        with time_limit(TEMPLATE_LIMIT_S):  # a template is a program that came with the model
            return self._tokenizer.apply_chat_template(messages, tools=tools or None, **options)

    def _hide(self, value: Any, hidden: list[str]) -> Any:
        """Return the message with a number in place of each special token in its texts, and append these to `hidden`."""

        def number(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{HIDDEN}{len(hidden) - 1};"

        match value:
            case str():
                whole = value.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
                return self._marker.sub(number, whole)
            case dict():
                return {name: each if name == "role" else self._hide(each, hidden) for name, each in value.items()}
            case list():
                return [self._hide(each, hidden) for each in value]
        return value

    def _ids(self, text: str, hidden: list[str]) -> list[int]:
        """Return the tokens of a text in which `_hide` hid texts."""
        pieces = re.split(f"{HIDDEN}([0-9]+);", text)
        return [
            token
            for place, piece in enumerate(pieces)
            for token in (self._plain(hidden[int(piece)]) if place % 2 else self._encoded(piece))
        ]

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text of which no part becomes a special token: each is cut behind its first character."""
        found = self._marker.search(text)
        if found is None or len(found[0]) < 2:
            return self._encoded(text)
        cut = found.start() + 1
        return self._encoded(text[:cut]) + self._plain(text[cut:])

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        anchor = self._anchor_ids
        if anchor:
            ids = self._tokenizer.encode(ANCHOR + text, add_special_tokens=False)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self._tokenizer.encode(text, add_special_tokens=False)


def _contents(messages: list[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


@dataclass
class Conversation:
    """A row: its prompt, and behind it turns of the model and tokens between them.

    Attributes:
        prompt_ids: the first prompt.
        width: most tokens behind it.
        messages, tools: what the template has written so far.
        token_ids: behind the prompt.
        sampled: whether the model sampled each of them.
        log_probs: of each under the sampler; 0 if it was not sampled.
        turns: a record for each turn and each observation, as transcripts have it. Its `start` and `end` count from the prompt's
            first token.
        reason: why the conversation ended; empty before.
        failed: whether the reason is a failure of the environment.
        info: numbers of the environment; a later turn's replace an earlier one's.
        failure_reward: the reward of a failure.
    """

    prompt_ids: list[int]
    width: int
    messages: list[Message] = field(default_factory=list)
    tools: Tools = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    failed: bool = False
    info: dict[str, float] = field(default_factory=dict)
    failure_reward: float = 0.0

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.width - len(self.token_ids)

    @property
    def own_turns(self) -> list[dict[str, Any]]:
        """Records of the model's turns."""
        return [turn for turn in self.turns if turn["role"] == "assistant"]

    def add_turn(self, completion: Completion, chat: Chat) -> Turn:
        """Append a turn as it was sampled."""
        text, count = chat.text_of(completion), len(completion.token_ids)
        turn = Turn(text, len(self.own_turns), completion.finish_reason, count)
        log_probs = completion.log_probs or [0.0] * count
        self._append(completion.token_ids, True, log_probs, "assistant", text, finish_reason=completion.finish_reason)
        return turn

    def add_answer(self, observation: Observation, text: str, seconds: float) -> None:
        """Keep the environment's answer to the last turn, whose text is `text`, but not its messages."""
        numbers = {name: x for name, x in observation.info.items() if isinstance(x, bool | int | float)}
        self.info |= {name: float(x) for name, x in numbers.items() if abs(x) < LARGEST_NUMBER}  # NaN is not
        calls = observation.info.get("calls")
        calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        self.own_turns[-1].update(seconds=seconds, reward=observation.reward, calls=calls)
        self.messages.append(observation.assistant or {"role": "assistant", "content": text})

    def add_messages(self, messages: list[Message], chat: Chat) -> bool:
        """Append messages if a token is left for the model's answer to them, else return False. Raises as `Chat.between`."""
        characters = sum(len(str(message.get("content") or "")) for message in messages)
        if characters > CHARACTERS_PER_TOKEN * self.room:
            return False
        ids = chat.between(self.messages, messages, self.tools, self.token_ids[-1])
        if len(ids) >= self.room:
            return False
        self.messages += messages
        role = str(messages[-1].get("role", "user")) if messages else "user"
        self._append(ids, False, [0.0] * len(ids), role, _contents(messages))
        return True

    def end(self, reason: str) -> None:
        """End the conversation."""
        self.reason = reason

    def fail(self, reason: str, reward: float) -> None:
        """End the conversation with a failure; the last turn, if there is one, gets the reward."""
        self.reason, self.failed = reason, True
        if self.own_turns:
            self.own_turns[-1]["reward"] = reward
        self.failure_reward = reward

    @property
    def reward(self) -> float | None:
        """Sum of the rewards of its turns; None if the environment gave none."""
        given = [turn["reward"] for turn in self.own_turns if turn["reward"] is not None]
        if self.failed and not self.own_turns:
            return self.failure_reward
        return math.fsum(given) if given else None

    def _append(
        self,
        ids: list[int],
        sampled: bool,
        log_probs: list[float],
        role: str,
        text: str,
        finish_reason: str | None = None,
    ) -> None:
        start = len(self.prompt_ids) + len(self.token_ids)
        self.token_ids += ids
        self.sampled += [sampled] * len(ids)
        self.log_probs += log_probs
        record = {"start": start, "end": start + len(ids), "role": role, "text": text, "seconds": None, "reward": None}
        self.turns.append({**record, "calls": [], "finish_reason": finish_reason})
