"""One conversation in tokens: those that the model sampled, and those that the chat template puts between its turns.

A turn's tokens stay as they were sampled; they are never read again from text. Where the template writes the history in another way
and a fork follows, a new branch begins: a row of its own, with that history. Pure data: no sampler, no process.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from rlx.environments.chat import Gap, Tools, Written, contents_of
from rlx.environments.protocol import CLOSE, OPEN, Message, Observation, Turn
from rlx.rollout.protocol import Completion, Kept, PrefixMemory

LARGEST_NUMBER = 1e300
OPENED_THOUGHT = re.compile(rf"{OPEN}\s*\Z")  # at the end of a prompt
CHARACTERS_PER_TOKEN = 100
"""Longer messages are not tokenised: they cannot fit into the tokens that are left."""


class Branch(NamedTuple):
    """The tokens of one row; see Conversation."""

    prompt_ids: list[int]
    token_ids: list[int]
    sampled: list[bool]
    log_probs: list[float]
    versions: Sequence[int] = ()  # of the weights that sampled its first tokens; those behind are as new as the sampler

    def stamped(self, version: int) -> list[int]:
        """Return the versions of all tokens; those without one are of this one."""
        return [*self.versions, *[version] * (len(self.token_ids) - len(self.versions))]


@dataclass
class Conversation:
    """A prompt, and behind it turns of the model and tokens between them."""

    prompt_ids: list[int]  # the first prompt; in a later branch as much of it as the rewritten history begins with
    width: int  # most tokens behind it
    messages: list[Message] = field(default_factory=list)  # that the template has written so far
    tools: Tools = field(default_factory=list)
    answers: list[int] = field(default_factory=list)  # places in `messages` of those that followed turns
    text: str = ""  # of them up to the next turn, as the template writes it
    earlier: list[Branch] = field(default_factory=list)  # the branches before this one
    token_ids: list[int] = field(default_factory=list)  # behind the prompt
    sampled: list[bool] = field(default_factory=list)  # whether the model sampled each of them
    log_probs: list[float] = field(default_factory=list)  # of each under the sampler; 0 if it was not sampled
    versions: Sequence[int] = ()  # see Branch
    begun: Kept = field(default_factory=Kept)  # tokens of a turn that is not whole yet
    seen: list[str] = field(default_factory=list)  # digests of the environment's answers, see `EnvironmentPool.restore`
    waited_s: float = field(default=0.0, compare=False)  # in which its process had nothing to sample, in all phases
    # A record for each turn and each observation, as transcripts have it. Its `start` and `end` count from the first
    # token of the prompt of its `branch`. The record of a rewritten history has the role `history`.
    turns: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""  # why the conversation ended; empty before
    failed: bool = False  # whether the reason is a failure of the environment
    info: dict[str, float] = field(default_factory=dict)  # of the environment; a later turn's replace an earlier one's
    failure_reward: float = 0.0  # the reward of a failure
    traceback: str = ""  # of the environment's failure; empty if there is none
    memory: PrefixMemory = field(default_factory=PrefixMemory, compare=False, repr=False)  # of the sampler

    @property
    def room(self) -> int:
        return self.width - len(self.token_ids)

    @property
    def branches(self) -> list[Branch]:
        return [*self.earlier, Branch(self.prompt_ids, self.token_ids, self.sampled, self.log_probs, self.versions)]

    @property
    def own_turns(self) -> list[dict[str, Any]]:
        return [turn for turn in self.turns if turn["role"] == "assistant"]

    @property
    def is_finished(self) -> bool:
        return bool(self.reason)

    def whole_turn(self, completion: Completion) -> Completion:
        """Return a completion with the tokens of its turn that came before it."""
        if not self.begun.token_ids:
            return completion
        begun, self.begun = self.begun, Kept()
        self.versions = [*self.versions, *begun.versions]
        log_probs = completion.log_probs and [*begun.log_probs, *completion.log_probs]
        return completion._replace(token_ids=[*begun.token_ids, *completion.token_ids], log_probs=log_probs)

    def stamp(self, version: int) -> None:
        """Note that tokens without a version are of this one."""
        branches = [own._replace(versions=own.stamped(version)) for own in self.branches]
        self.earlier, self.versions = branches[:-1], branches[-1].versions

    def add_turn(self, completion: Completion, text: str) -> Turn:
        """Append a turn as it was sampled; its text is `Chat.texts_of`."""
        count = len(completion.token_ids)
        turn = Turn(text, len(self.own_turns), completion.finish_reason, count)
        log_probs = completion.log_probs or [0.0] * count
        self.append(completion.token_ids, True, log_probs, "assistant", text, finish_reason=completion.finish_reason)
        return turn

    def add_answer(self, observation: Observation, seconds: float) -> None:
        """Keep the environment's answer to the last turn, but not its messages."""
        self.take_info(observation.info)
        calls = observation.info.get("calls")
        calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        turn = self.own_turns[-1]
        turn.update(seconds=seconds, reward=observation.reward, calls=calls)
        said = observation.assistant or {"role": "assistant", "content": turn["text"]}
        self.messages.append(with_opening(said, self.text))

    def take_info(self, info: dict[str, Any]) -> None:
        numbers = {name: x for name, x in info.items() if isinstance(x, bool | int | float)}
        self.info |= {name: float(x) for name, x in numbers.items() if abs(x) < LARGEST_NUMBER}  # NaN is not

    def gap(self, messages: list[Message], may_fork: bool = False) -> Gap | None:
        """Return the place of messages behind the last turn; None if they are longer than any text that fits."""
        characters = sum(len(str(message.get("content") or "")) for message in messages)
        if characters > CHARACTERS_PER_TOKEN * (self.width if may_fork else self.room):
            return None
        said = self.own_turns[-1]["text"]
        return Gap(self.messages, messages, self.tools, self.token_ids[-1], self.text, said, {*self.answers})

    def add_messages(self, messages: list[Message], written: Written) -> bool:
        """Append messages, written as tokens, if one is left for the model's answer to them, else return False."""
        ids, role = written.token_ids, str(messages[-1].get("role", "user")) if messages else "user"
        role = "environment" if role == "assistant" else role  # that of records of the model's own turns
        if written.is_rewritten:
            prompt, role = max(1, common(self.prompt_ids, ids)), "history"
            if len(ids) - prompt >= self.width:
                return False
            self.earlier = self.branches
            self.prompt_ids, self.token_ids, self.sampled, self.log_probs = ids[:prompt], [], [], []
            self.versions = ()
            ids = ids[prompt:]
        elif len(ids) >= self.room:
            return False
        self.answers += range(len(self.messages), len(self.messages) + len(messages))
        self.messages += messages
        self.text = written.text
        self.append(ids, False, [0.0] * len(ids), role, contents_of(messages))
        return True

    def fail(self, reason: str, reward: float, traceback: str = "") -> None:
        """End the conversation with a failure; the last turn, if there is one, gets the reward."""
        self.reason, self.failed, self.traceback = reason, True, traceback
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

    def append(
        self,
        ids: list[int],
        sampled: bool,
        log_probs: list[float],
        role: str,
        text: str,
        finish_reason: str | None = None,
    ) -> None:
        """Append tokens of one record."""
        start = len(self.prompt_ids) + len(self.token_ids)
        self.token_ids += ids
        self.sampled += [sampled] * len(ids)
        self.log_probs += log_probs
        record = {"start": start, "end": start + len(ids), "role": role, "text": text, "seconds": None, "reward": None}
        self.turns.append({**record, "calls": [], "finish_reason": finish_reason, "branch": len(self.earlier)})


def with_opening(message: Message, before: str) -> Message:
    """Return a turn with the opening of a thought that the prompt has and the turn closes: templates look for both."""
    opening, content = OPENED_THOUGHT.search(before), message.get("content")
    if opening is None or not isinstance(content, str) or CLOSE not in content or OPEN in content:
        return message
    return {**message, "content": opening[0] + content}


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
