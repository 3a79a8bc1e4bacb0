"""The interface between a sampler's turns and an environment. It imports nothing, because every environment process loads it.

An environment of your own is a class with `reset` and `step`. Both may be async: then many conversations of one process wait at the
same time.

    class Echo:
        def reset(self, row):
            return row["prompt"]

        def step(self, turn):
            return Observation([{"role": "user", "content": turn.text}], reward=float(len(turn.text) < 9), done=turn.index == 2)
"""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

OPEN, CLOSE = "<think>", "</think>"
"""Marks of a thought in a turn."""
Message = dict[str, Any]
"""A chat message: `role`, `content`, and what a chat template reads beside them, such as `tool_calls`."""


class Turn(NamedTuple):
    """One turn of the model."""

    text: str  # its tokens decoded, with special tokens, because they may mark a call; without the token that ended the turn
    index: int  # 0 for the conversation's first turn
    finish_reason: Literal["stop", "length"] = "stop"  # "stop", or "length" if the turn was cut
    token_count: int = 0  # number of sampled tokens


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn."""

    messages: list[Message]  # what the model reads before its next turn; may be empty if `done`
    # Of this turn, finite in fp32; None if the environment gives none: reward functions then score the conversation
    reward: float | None = None
    done: bool = False  # whether the conversation has ended
    # Further data for transcripts, as JSON has it. Numbers at its top become metrics. `calls` is a list of {"name": str,
    # "error": bool, "seconds": float}, one for each tool call.
    info: dict[str, Any] = field(default_factory=dict)
    # The turn as the chat template wants it, such as with `tool_calls`; None: its plain text
    assistant: Message | None = None


class Environment(Protocol):
    """One conversation's other side. rlx makes an object for each conversation: `Class(**environment.kwargs)`.

    Methods may be plain functions or async ones. A class may also have `tools`: a list of JSON schemas for the chat template, read
    after `reset`; and `close()`, called when the conversation has ended in any way that leaves the process alive.
    """

    def reset(self, row: dict[str, Any]) -> "list[Message] | Awaitable[list[Message]]":
        """Begin the conversation and return its first messages.

        Args:
            row: `prompt` (messages), `data_source`, `ground_truth` and `extra_info` of the data set, and `seed`: in [0, 2**63), of
                this sample.
        """
        ...

    def step(self, turn: Turn) -> "Observation | Awaitable[Observation]": ...


class Reset(NamedTuple):
    """The beginning of a conversation: its first messages, and JSON schemas of its tools."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class Failure(NamedTuple):
    """The reason why a conversation cannot continue.

    Kinds: "error", the environment raised; "timeout", it took too long; "memory", it wanted more than it may have; "crash", its process
    ended; "nonsense", its answer has another form than `Observation`. The traceback is that of the environment's own code, empty if there
    is none.
    """

    reason: str
    kind: Literal["error", "timeout", "memory", "crash", "nonsense"]
    traceback: str = ""
