"""Anthropic's protocol as data: its requests become OpenAI's, and OpenAI's answers become its own."""

import json
from collections.abc import Iterator
from typing import Any

from rlx.environments.openai_calls import BadCall, Call, read

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NOT_HERE = {"n", "stop", "logprobs", "return_token_ids", "stream_options"}


def read_message(data: bytes) -> Call:
    """Read the body of a request. Raises BadCall."""
    try:
        body = dict(json.loads(data))
        messages = [own for message in body.pop("messages") for own in _messages(**message)]
        if system := body.pop("system", None):
            messages.insert(0, {"role": "system", "content": _text(system)})
        tools = [_tool(**tool) for tool in body.pop("tools", ())]
        renamed = {"stop": body.pop("stop_sequences", None), "tool_choice": body.pop("tool_choice", {}).get("type")}
        if other := body.keys() & NOT_HERE:
            raise BadCall(f"{min(other)}: there is no such field here; leave it out")
        text = json.dumps({**body, **renamed, "messages": messages, "tools": tools})
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise BadCall("the body is no request of Anthropic's messages, of texts and tools alone") from None
    return read(True, text.encode()).model_copy(update={"is_messages": True})


def _tool(name: str, input_schema: dict[str, Any], description: str = "", **_: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": input_schema}}


def _text(blocks: Any) -> str:
    if isinstance(blocks, str):
        return blocks
    if other := next((block["type"] for block in blocks or () if block["type"] != "text"), None):
        raise BadCall(f"messages: got a block of type {ascii(other)[:100]}, expected text, tool_use or tool_result")
    return "\n".join(block["text"] for block in blocks or ())


def _messages(role: str, content: Any) -> Iterator[dict[str, Any]]:
    """Yield OpenAI's messages of one: results of tools, then its text with calls."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    taken = {"assistant": "tool_use", "user": "tool_result"}.get(role)
    made, texts = [], [block for block in blocks if block["type"] != taken]
    for block in (block for block in blocks if block["type"] == taken):
        if role == "user":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block.get("content"))}
        else:
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            made.append({"id": block["id"], "function": function})
    if texts or made:
        yield {"role": role, "content": _text(texts), "tool_calls": made or None}


def message_of(whole: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of OpenAI's protocol as a message."""
    (choice,), usage = whole["choices"], whole["usage"]
    said = choice["message"]
    content = [{"type": "text", "text": said["content"]}] if said["content"] else []
    for call in said.get("tool_calls", ()):
        own = {"name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
        content.append({"type": "tool_use", "id": call["id"], **own})
    head = {"id": whole["id"], "type": "message", "role": "assistant", "model": whole["model"], "content": content}
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    reason, sequence = STOPS[choice["finish_reason"]], choice["stop_reason"]
    if reason == "end_turn" and sequence is not None:
        reason = "stop_sequence"
    return {**head, "stop_reason": reason, "stop_sequence": sequence, "usage": counts}


def message_events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer of OpenAI's protocol as the events of a stream of Anthropic's."""
    message = message_of(whole)
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ends = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ends, "usage": message["usage"]}
    yield {"type": "message_stop"}
