"""OpenAI's protocol as data: read a request, find the turn that its messages continue, write the answer. No sockets, no tokens."""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from rlx.environments.protocol import CLOSE, Message, Turn
from rlx.environments.tool_calls import parse
from rlx.environments.tools import arguments_of, call_id, called, json_or_text, with_calls
from rlx.processes.lines import shallow

TOKEN = re.compile(r"rlx-\d+-[0-9a-f]{64}")
MOST_CHOICES, MOST_MESSAGES, MOST_TOOLS, MOST_STOPS = 64, 4096, 256, 16
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
CHOSEN_BY_RUN = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
"""Fields that would change the distribution that the trainer assumes: the run's own values hold."""
WITHOUT_EFFECT = {"model", "user", "store", "metadata", "service_tier", "prompt_cache_key", "parallel_tool_calls"}
ONLY_OF = {
    True: {"messages", "tools", "tool_choice", "top_logprobs", "response_format", "max_completion_tokens"},
    False: {"prompt", "best_of", "echo"},
}
"""Fields of chats, and of other requests."""
Name = tuple[int, int]
"""A turn's name: number of its call, and of the choice in it."""


class BadCall(Exception):
    """A request that is not sampled, with its HTTP status."""

    def __init__(self, text: str, status: int = 400, code: str | None = None):
        super().__init__(text)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}}


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Function(BaseModel):
    name: str
    arguments: str = "{}"


class _MadeCall(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    """A message; fields that are not here reach no chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_MadeCall] | None = None
    tool_call_id: str | None = None

    def templated(self) -> Message:
        """Return it as chat templates want it: one text, and calls whose arguments are objects."""
        parts, role = self.content, "system" if self.role == "developer" else self.role
        content = "\n".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        found: Message = {"role": role, "content": content}
        found |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name))}
        calls = [
            called(each.id, each.function.name, _object(each.function.arguments)) for each in self.tool_calls or ()
        ]
        return found | ({"tool_calls": calls} if calls else {})


class Call(BaseModel, extra="forbid"):
    """A request for turns behind messages, or for text behind a text or token ids."""

    is_chat: bool
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: list[str] = Field([], max_length=MOST_STOPS)
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    max_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool = False
    logprobs: int | None = Field(None, ge=0, le=1)
    chosen: dict[str, float] = {}  # fields of CHOSEN_BY_RUN
    is_messages: bool = False  # whether it came in Anthropic's protocol
    sample: str | None = None  # the token of a sample that `model` has in place of a name
    messages: list[_Message] = Field([], max_length=MOST_MESSAGES)
    tools: list[dict[str, Any]] = Field([], max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none"] = "auto"
    top_logprobs: Literal[0] = 0
    response_format: dict[Literal["type"], Literal["text"]] = {}
    prompt: str | list[int] = ""
    best_of: Literal[1] = 1
    echo: Literal[False] = False

    @cached_property
    def templated(self) -> list[Message]:
        return [message.templated() for message in self.messages]

    @cached_property
    def properties(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the schemas of arguments by tool. Raises BadCall."""
        found = {}
        for tool in self.tools:
            match tool:
                case {"type": "function", "function": {"name": str(name), **rest}} if name:
                    parameters = rest.get("parameters") or {}
                    found[name] = parameters.get("properties", {}) if isinstance(parameters, dict) else None
                    if isinstance(found[name], dict) and all(isinstance(x, dict) for x in found[name].values()):
                        continue
            raise BadCall(
                f"tools: got {ascii(tool)[:100]}, expected a function with a name and JSON schemas of arguments"
            )
        return found

    @property
    def wishes(self) -> dict[str, Any]:
        """The part that the worker reads."""
        with_log_probs = self.logprobs == 1 or (self.logprobs == 0 and not self.is_chat)
        names = {"is_chat", "n", "stop", "max_tokens", "seed", "return_token_ids", "chosen", "tools"}
        return self.model_dump(include=names) | {"with_log_probs": with_log_probs}


def read(is_chat: bool, data: bytes) -> Call:
    """Read the body of a request. Raises BadCall."""
    try:
        body = shallow(json.loads(data))
        if b"\\ud" in data.lower():  # half a surrogate pair is no text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise BadCall("the body is no JSON of whole characters, or nested too deep") from None
    if not isinstance(body, dict):
        raise BadCall("the body is no JSON object")
    model = body.get("model")
    body = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT}
    if other := body.keys() & {"chosen", "is_chat", "is_messages", "sample", *ONLY_OF[not is_chat]}:
        raise BadCall(f"{min(other)}: there is no such field here; leave it out")
    chosen = {name: body.pop(name) for name in CHOSEN_BY_RUN if name in body}
    if isinstance(body.get("stop"), str):
        body["stop"] = [body["stop"]]
    if is_chat and "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    try:
        sample = model if isinstance(model, str) and TOKEN.fullmatch(model) else None
        call = Call(**body, is_chat=is_chat, chosen=chosen, sample=sample)
    except ValidationError as fault:
        raise BadCall(_told(fault)) from None
    if not all(call.stop):
        raise BadCall("stop: got an empty text, expected texts that end a turn")
    if not (call.messages if is_chat else call.prompt) or (is_chat and call.messages[-1].role == "assistant"):
        raise BadCall("messages or prompt: got none, or the assistant's at the end; expected something to continue")
    _ = call.properties
    return call


def _told(fault: ValidationError) -> str:
    first = fault.errors(include_url=False, include_context=False)[0]
    where = ascii(".".join(map(str, first["loc"]))[:200])[1:-1]
    if first["type"] == "extra_forbidden":
        return f"{where}: rlx does not support this field; leave it out"
    return f"{where}: {first['msg'][:300]}, got {ascii(first['input'])[:100]}"


def _object(text: str) -> Any:
    found = json_or_text(text or "{}")
    return found if isinstance(found, dict) else text


class Said(NamedTuple):
    """A turn of the model as an agent reads it."""

    message: dict[str, Any]  # of the answer
    templated: Message | None = None  # the same for the chat template; None: the turn's plain text


def said(text: str, call: Call, tool_format: str, index: int) -> Said:
    """Return what an agent reads of the sample's turn number `index`.

    If one of its calls cannot be read all of them stay text, so that the agent loses nothing.
    """
    plain, made = Said({"role": "assistant", "content": text}), []
    if not call.tools or call.tool_choice == "none":
        return plain
    content, calls = parse(tool_format, text, [*call.properties])
    for place, each in enumerate(calls):
        arguments = arguments_of(each, call.properties.get(each.name, {}))
        if each.fault or arguments is None:
            return plain
        number = call_id(Turn(text, index), place)
        made.append(called(number, each.name, json.dumps(arguments, ensure_ascii=False)))
    if not made:
        return plain
    is_plain = any(isinstance(each.arguments, str) for each in calls)  # as in ToolEnvironment
    templated = None if is_plain else with_calls(content, calls, Turn(text, index))
    return Said({"role": "assistant", "content": content or None, "tool_calls": made}, templated)


class Place(NamedTuple):
    """The turn that a request continues."""

    turn: Name | None  # None: a conversation that begins
    templated: Message | None  # the turn as the chat template wants it; None: its plain text
    added: list[Message]  # the messages behind it
    is_rewritten: bool = False  # whether the request has other turns than the model's


class History:
    """The turns of a sample that its agent has read, by all that came before them.

    A turn's words need not come back exactly: with `refuse` white space may differ, with `keep` also thoughts may be missing.
    """

    def __init__(self, on_rewritten: str):
        self._mode = on_rewritten
        self._of_prefix: dict[bytes, tuple[Name, Message | None]] = {}
        self._texts: dict[str, Name] = {}

    def place(self, call: Call) -> Place:
        """Return where a request continues. Raises BadCall if it changes turns and the run does not fork then."""
        if not call.is_chat:
            prompt = call.prompt if isinstance(call.prompt, str) else ""
            before = max((text for text in self._texts if prompt.startswith(text)), key=len, default="")
            return Place(self._texts.get(before), None, [{"role": "user", "content": prompt[len(before) :]}])
        count, found = 0, None
        for place, prefix in enumerate(self._prefixes(call.tools, call.templated)):
            if prefix in self._of_prefix:
                count, found = place + 1, self._of_prefix[prefix]
        added = call.templated[count:]
        if not self._of_prefix or all(message["role"] != "assistant" for message in added):
            return Place(*(found or (None, None)), added)
        if self._mode != "fork":
            raise BadCall(
                "messages: a turn of the assistant is not what the model said, or the messages or tools before it have changed; "
                "send turns back as they came, or set actor_rollout_ref.rollout.multi_turn.on_rewritten_history=fork to train on "
                "such a history as a row of its own",
                code="rewritten_history",
            )
        return Place(None, None, call.templated, True)

    def add(self, call: Call, turn: Name, answer: Said, whole_text: str) -> None:
        """Take a turn that the agent reads; `whole_text` has the stop token that ended it."""
        if call.is_chat:
            sent = _Message.model_validate(answer.message).templated()
            *_, last = self._prefixes(call.tools, [*call.templated, sent])
            self._of_prefix[last] = turn, answer.templated
        elif isinstance(call.prompt, str):
            self._texts[call.prompt + whole_text] = turn

    def _prefixes(self, tools: list[dict[str, Any]], messages: Sequence[Message]) -> Iterator[bytes]:
        digest = hashlib.blake2b(_bytes(tools), digest_size=16)
        for message in messages:
            text = message["content"]
            if message["role"] == "assistant" and self._mode != "fork":
                text = "".join((text.rpartition(CLOSE)[2] if self._mode == "keep" else text).split())
            digest.update(_bytes({**message, "content": text}))
            yield digest.digest()


def _bytes(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True).encode()
    return b"%d:%b" % (len(text), text)


def answer(call: Call, number: int, content: dict[str, Any], turns: Sequence[Said]) -> dict[str, Any]:
    """Return the whole answer from what the worker sampled, see `AgentRun`."""
    written = []
    for index, (choice, turn) in enumerate(zip(content["choices"], turns, strict=True)):
        own = {"index": index, "finish_reason": choice["finish_reason"], "logprobs": _log_probs(call, choice)}
        own["stop_reason"] = choice["stop_string"]  # vLLM's field
        if "tool_calls" in turn.message and choice["finish_reason"] == "stop":
            own["finish_reason"] = "tool_calls"
        own |= {"message": turn.message} if call.is_chat else {"text": choice["text"]}
        written.append(own | ({"token_ids": choice["token_ids"]} if call.return_token_ids else {}))
    count, made = content["prompt_tokens"], sum(choice["count"] for choice in content["choices"])
    return {
        "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{number}",
        "object": "chat.completion" if call.is_chat else "text_completion",
        "created": int(time.time()),
        "choices": written,
        "usage": {"prompt_tokens": count, "completion_tokens": made, "total_tokens": count + made},
        **({"prompt_token_ids": content["prompt_ids"]} if call.return_token_ids else {}),
    }


def _log_probs(call: Call, choice: dict[str, Any]) -> dict[str, Any] | None:
    if "log_probs" not in choice:
        return None
    texts, log_probs = choice["token_texts"], choice["log_probs"]
    if call.is_chat:
        pairs = zip(texts, log_probs, strict=True)
        return {"content": [{"token": t, "logprob": x, "bytes": [*t.encode()], "top_logprobs": []} for t, x in pairs]}
    starts = [0, *accumulate(map(len, texts))][:-1]
    return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": starts}


def events(call: Call, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer as the events of a stream."""
    kind = "chat.completion.chunk" if call.is_chat else "text_completion"
    head = {"id": whole["id"], "object": kind, "created": whole["created"], "model": whole["model"]}
    for own in whole["choices"]:
        if call.is_chat:
            message = own.pop("message")
            calls = [{"index": place, **each} for place, each in enumerate(message.get("tool_calls", ()))]
            delta = message | ({"tool_calls": calls} if calls else {})
            yield head | {"choices": [own | {"delta": delta, "finish_reason": None}]}
            own = {"index": own["index"], "delta": {}, "finish_reason": own["finish_reason"]}
        yield head | {"choices": [own]}
    if call.stream_options.get("include_usage"):
        yield head | {"choices": [], "usage": whole["usage"]}
