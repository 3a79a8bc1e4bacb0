"""The form of what environments return: an environment process makes JSON of it, and the worker checks it again."""

import json
import math
from typing import Any, get_args

from rlx.environments.protocol import Failure, Message, Observation, Reset
from rlx.processes.calls import in_short
from rlx.processes.lines import DEEPEST, BadAnswer, shallow

LONGEST_ANSWER = 2**20  # bytes
LARGEST_REWARD = 1e30
"""Rewards are stored, added and compared in fp32."""
LONGEST_REASON, LONGEST_TRACEBACK = 2000, 4000  # characters
Answer = Reset | Observation | Failure


class Nonsense(ValueError):
    """An environment's answer has another form than the protocol's."""


def checked_reset(messages: Any, tools: Any) -> Reset:
    """Return the beginning of a conversation. Raises Nonsense."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Nonsense(f"has tools {in_short(tools)}, expected a list of JSON schemas")
    found = _messages(messages, "reset")
    if not found:
        raise Nonsense("reset returned no messages, expected at least one")
    return Reset(found, tools)


def checked_observation(value: Any) -> Observation:
    """Return an Observation, or a dict with its fields, as an Observation. Raises Nonsense."""
    if isinstance(value, dict):
        try:
            value = Observation(**value)
        except TypeError as fault:
            raise Nonsense(
                f"step returned {in_short(value)}, expected the fields of an Observation ({fault})"
            ) from None
    if not isinstance(value, Observation):
        raise Nonsense(f"step returned {in_short(value)}, expected an Observation or a dict with its fields")
    done, info = plain(value.done), value.info
    if not isinstance(done, bool):
        raise Nonsense(f"step returned done={in_short(done)}, expected True or False")
    if not isinstance(info, dict):
        raise Nonsense(f"step returned info={in_short(info)}, expected a dict")
    reward, messages = _reward(value.reward), _messages(value.messages, "step")
    if not messages and not done:
        raise Nonsense("step returned no messages and done=False, expected messages or the end")
    assistant = None if value.assistant is None else _messages([value.assistant], "assistant")[0]
    return Observation(messages, reward, done, info, assistant)


def _reward(value: Any) -> float | None:
    value = plain(value)
    if value is None:
        return None
    if isinstance(value, int | float) and abs(value) <= LARGEST_REWARD:  # false for NaN
        return float(value)
    raise Nonsense(f"step returned reward={in_short(value)}, expected a finite number (in fp32) or None")


def _messages(value: Any, what: str) -> list[Message]:
    if not isinstance(value, list | tuple):
        raise Nonsense(f"{what} returned {in_short(value)} as messages, expected a list of dicts")
    for message in value:
        match message:
            case {"role": str()} if isinstance(message.get("content", ""), str | list | None):
                continue
        raise Nonsense(f"{what} returned {in_short(message)} as a message, expected a dict with `role` and `content`")
    # Without lone surrogates, which no tokenizer reads
    texts = [{name: x for name in ("role", "content") if isinstance(x := each.get(name), str)} for each in value]
    readable = [{name: text.encode("utf-8", "replace").decode() for name, text in each.items()} for each in texts]
    return [{"content": "", **message, **own} for message, own in zip(value, readable, strict=True)]


def plain(value: Any) -> Any:
    """Return numpy's and torch's numbers as Python's, arrays as lists, and anything else unchanged."""
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        return value.item() if math.prod(value.shape) == 1 and not value.shape else value.tolist()
    return value


def encode(number: int, answer: Answer) -> bytes:
    """Return the line of an answer to the conversation of this number. Raises Nonsense."""
    match answer:
        case Reset(messages, tools):
            record: list[Any] = [number, "reset", messages, tools]
        case Observation():
            record = [number, "step", vars(answer)]
        case Failure(reason, kind, trace):
            record = [number, "failure", reason[:LONGEST_REASON], kind, trace]
    try:
        text = json.dumps(shallow(record, 2 * DEEPEST), ensure_ascii=False, allow_nan=False, default=as_json)
    except (TypeError, ValueError, RecursionError) as fault:
        raise Nonsense(f"returned what JSON does not have: {fault}") from None
    line = text.encode("utf-8", "replace") + b"\n"
    if len(line) > LONGEST_ANSWER:
        raise Nonsense(f"returned {len(line):,} bytes, expected at most {LONGEST_ANSWER:,}")
    return line


def as_json(value: Any) -> Any:
    """Return what `json.dumps` writes in place of a value that it does not know. Raises TypeError."""
    found = plain(value)
    if found is value:
        raise TypeError(f"{in_short(value)} of type {type(value).__name__}")
    return found


def decode(record: Any, asked: dict[int, Any]) -> tuple[int, Answer]:
    """Read an answer to a conversation of `asked`, by number; one that has `taken` none awaits that of its reset.

    Raises BadAnswer if it has another form, or was not asked for.
    """
    kinds = get_args(Failure.__annotations__["kind"])
    try:
        match record:
            case [int(number), "reset", messages, tools] if number in asked and not asked[number].taken:
                return number, checked_reset(messages, tools)
            case [int(number), "step", dict(fields)] if number in asked and asked[number].taken:
                return number, checked_observation(fields)
            case [int(number), "failure", str(reason), str(kind), str(trace)] if number in asked and kind in kinds:
                return number, Failure(reason, kind, trace)  # type: ignore[arg-type]
    except Nonsense as fault:
        raise BadAnswer(f"sent an answer of another form than rlx's: {fault}") from None
    raise BadAnswer("sent an answer of another form than rlx's")
