"""Find the tool calls in what a model wrote. Each family of models has its own format, and its chat template shows which.

A parser never raises, and takes time linear in the text: models write anything. A call that it cannot read becomes a Call with a
`fault`, which the model gets as the tool's answer.

Sources of the formats: the chat templates of Hermes 2 Pro, Qwen 2.5 and Qwen 3 (`hermes`), Qwen3-Coder (`qwen3_coder`), Llama 3.1
(`llama3_json`), Mistral's with `[TOOL_CALLS]` (`mistral`). `tags` is rlx's own, for models over bytes: `<calc>3+4</calc>`.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlx.processes.lines import shallow

MOST_CALLS = 32
"""Of one turn; further calls become one fault."""


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str  # of the tool; empty if it cannot be read
    arguments: dict[str, Any] | str  # by name; or a text, which is the only argument
    fault: str = ""  # why the call cannot be read; empty if it can
    as_text: bool = False  # whether all values are texts, because the format has no types


class Parsed(NamedTuple):
    """A turn: the text beside its calls, and its calls in order."""

    content: str
    calls: list[ToolCall]


def parse(tool_format: str, text: str, names: Sequence[str]) -> Parsed:
    """Return the calls of a turn's text, with special tokens, in one of FORMATS; `names` are those of the tools there are."""
    content, calls = FORMATS[tool_format](text, names)
    if len(calls) > MOST_CALLS:
        calls = [*calls[:MOST_CALLS], _faulty(f"only the first {MOST_CALLS} of {len(calls)} calls were made")]
    return Parsed(content.strip(), calls)


def hermes(text: str, names: Sequence[str]) -> Parsed:
    """`<tool_call>{"name": "calc", "arguments": {"expression": "3+4"}}</tool_call>`."""
    content, found = _cut(text, "<tool_call>", "</tool_call>")
    calls = [_call(_json(inner), "arguments") if ends else _endless("</tool_call>") for _, inner, ends in found]
    return Parsed(content, calls)


def qwen3_coder(text: str, names: Sequence[str]) -> Parsed:
    """`<tool_call><function=calc><parameter=expression>3+4</parameter></function></tool_call>`."""
    content, found = _cut(text, "<function=", "</function>")
    for mark in ("<tool_call>", "</tool_call>"):
        content = content.replace(mark, "")
    calls = []
    for _, inner, ends in found:
        name, closes, body = inner.partition(">")
        _, parameters = _cut(body, "<parameter=", "</parameter>")
        pairs = [parameter.partition(">") for _, parameter, _ in parameters]
        are_whole = all(whole and mark for (_, _, whole), (_, mark, _) in zip(parameters, pairs, strict=True))
        if not (ends and closes and are_whole):
            calls.append(_endless("</function>, and </parameter> after each value"))
            continue
        values = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, _, value in pairs}
        calls.append(ToolCall(name.strip(), values, as_text=True))
    return Parsed(content, calls)


def mistral(text: str, names: Sequence[str]) -> Parsed:
    """`[TOOL_CALLS][{"name": "calc", "arguments": {…}}]`, or `[TOOL_CALLS]calc[ARGS]{…}` of newer models."""
    content, *segments = text.split("[TOOL_CALLS]")
    calls = []
    for segment in segments:
        if segment.lstrip().startswith(("[", "{")):
            value = _json(segment)
            calls += [_call(each, "arguments") for each in (value if isinstance(value, list) else [value])]
            continue
        name, brace, arguments = segment.partition("{")
        name = re.sub(r"\[CALL_ID\][^\[]*|\[ARGS\]", "", name).strip()
        value = _json(brace + arguments)
        calls.append(value if isinstance(value, ToolCall) else _call({"name": name, "arguments": value}, "arguments"))
    return Parsed(content, calls)


def llama3_json(text: str, names: Sequence[str]) -> Parsed:
    """`{"name": "calc", "parameters": {…}}` as the whole turn, several apart by `;`, perhaps after `<|python_tag|>`."""
    before, mark, after = text.partition("<|python_tag|>")
    content, body = (before, after) if mark else ("", text)
    body = body.replace("<|eom_id|>", "").replace("<|eot_id|>", "").strip()
    if not body.startswith("{"):
        return Parsed(content, [_faulty("expected one JSON object after <|python_tag|>")]) if mark else Parsed(text, [])
    calls, place = [], 0
    while place < len(body):
        try:
            value, place = _DECODER.raw_decode(body, place)
            shallow(value)
        except (ValueError, RecursionError) as fault:
            # A text that begins with a brace is no call unless it looks like one.
            looks = mark or '"name"' in body
            return Parsed(content, [*calls, _faulty(_no_json(fault))]) if looks else Parsed(text, [])
        calls.append(_call(value, "parameters"))
        place = _BETWEEN.match(body, place).end()
    return Parsed(content, calls)


def tags(text: str, names: Sequence[str]) -> Parsed:
    """`<calc>3+4</calc>`: the text of the only argument, or a JSON object of all arguments."""
    if not names:
        return Parsed(text, [])
    content, found = _cut(text, f"<({'|'.join(map(re.escape, names))})>", r"</\1>")
    calls = [ToolCall(mark[1], inner) if ends else _endless(f"</{mark[1]}>") for mark, inner, ends in found]
    return Parsed(content, calls)


FORMATS: dict[str, Callable[[str, Sequence[str]], Parsed]] = {
    parser.__name__: parser for parser in (tags, hermes, llama3_json, mistral, qwen3_coder)
}


def _cut(text: str, begin: str, end: str) -> tuple[str, list[tuple[re.Match[str], str, bool]]]:
    """Return the text outside of all pairs of marks; and for each pair its first mark, the text inside, and whether its end is there.

    `begin` is a regular expression, and `end` may refer to its groups.
    """
    outside, inside, place = [], [], 0
    while first := re.compile(begin).search(text, place):
        outside.append(text[place : first.start()])
        mark = first.expand(end)
        stop = text.find(mark, first.end())
        ends = stop >= 0
        inside.append((first, text[first.end() : stop if ends else None], ends))
        place = stop + len(mark) if ends else len(text)
    return "".join((*outside, text[place:])), inside


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
_BETWEEN = re.compile(r"[\s;]*")


def _json(text: str) -> Any:
    try:
        return shallow(_DECODER.decode(text))
    except (ValueError, RecursionError) as fault:
        return _faulty(_no_json(fault))


def _no_json(fault: Exception) -> str:
    return f"it is no JSON ({'nested too deep' if isinstance(fault, RecursionError) else fault})"


def _call(value: Any, key: str) -> ToolCall:
    """Return the call that a JSON object describes."""
    if isinstance(value, ToolCall):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _faulty(f'expected a JSON object with "name" and "{key}"')
    # Some models write the other family's word.
    arguments = value.get(key, value.get("arguments" if key == "parameters" else "parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, f'its "{key}" are no JSON object')
    return ToolCall(value["name"], arguments)


def _faulty(fault: str) -> ToolCall:
    return ToolCall("", {}, fault)


def _endless(end: str) -> ToolCall:
    return _faulty(f"it has no end, expected {end}")
