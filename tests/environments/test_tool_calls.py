"""Calls in the formats of models; a text of any kind is read in a time linear in it."""

import json
import random

import pytest

from rlx.environments.tool_calls import FORMATS, MOST_CALLS, ToolCall, parse

NAMES = ("calc", "look_up")
ARGUMENTS = {"expression": '3+4 "<tool_call>" </b> é'}
CALL = {"name": "calc", "arguments": ARGUMENTS}


def written(tool_format, name, arguments):
    """A call as a model of that format writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return {
        "tags": f"<{name}>{json.dumps(arguments)}</{name}>",
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3_json": json.dumps({"name": name, "parameters": arguments}),
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
        "qwen3_coder": f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>",
    }[tool_format]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_of_each_format(tool_format):
    apart = ";" if tool_format == "llama3_json" else "\n"
    text = written(tool_format, "calc", {"a": 3}) + apart + written(tool_format, "look_up", {"b": "x\ny", "c": "{}"})
    before = "" if tool_format == "llama3_json" else "Let me see. "
    content, (first, second) = parse(tool_format, before + text, NAMES)
    assert content == before.strip() and (first.name, second.name) == NAMES and not first.fault + second.fault
    values = [
        call.arguments if isinstance(call.arguments, dict) else json.loads(call.arguments) for call in (first, second)
    ]
    assert values == [{"a": "3" if first.as_text else 3}, {"b": "x\ny", "c": "{}"}]
    assert parse(tool_format, "The answer is {7} <b>.", NAMES) == ("The answer is {7} <b>.", [])


@pytest.mark.parametrize(
    ("tool_format", "text", "fault"),
    [
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"expression": "3</tool_call>', "it is no JSON"),
        ("hermes", '<tool_call>{"name": "calc"', "it has no end, expected </tool_call>"),
        ("hermes", "<tool_call>[]</tool_call>", 'expected a JSON object with "name" and "arguments"'),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', 'expected a JSON object with "name"'),
        ("hermes", '<tool_call>{"name": "calc", "arguments": "3"}</tool_call>', 'its "arguments" are no JSON object'),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"a": NaN}}</tool_call>', "NaN is not finite"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"a": 1e999}}</tool_call>', "1e999 is not finite"),
        ("hermes", "<tool_call>" + "[" * 10**5 + "</tool_call>", "nested too deep"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"a": 1' + "0" * 10**4 + "}}</tool_call>", "it is no JSON"),
        ("qwen3_coder", "<tool_call><function=calc><parameter=a>3</function>", "it has no end"),
        ("qwen3_coder", "<function=calc", "it has no end"),
        ("qwen3_coder", "<function=calc</function>", "it has no end"),
        ("mistral", "[TOOL_CALLS]", "it is no JSON"),
        ("mistral", '[TOOL_CALLS]calc[ARGS]{"a": }', "it is no JSON"),
        ("mistral", "[TOOL_CALLS][3]", "expected a JSON object"),
        ("llama3_json", '{"name": "calc", "parameters": {', "it is no JSON"),
        ("llama3_json", "<|python_tag|>print(3)", "expected one JSON object"),
        ("tags", "<calc>3+4", "it has no end, expected </calc>"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_says_why(tool_format, text, fault):
    _, calls = parse(tool_format, text, NAMES)
    assert fault in calls[-1].fault and len(calls[-1].fault) < 300


def test_marks_inside_of_arguments_belong_to_them():
    assert parse("hermes", f"<tool_call>{json.dumps(CALL)}</tool_call>", NAMES).calls == [ToolCall("calc", ARGUMENTS)]
    old = parse("mistral", f"[TOOL_CALLS] {json.dumps([CALL, CALL])}", NAMES)
    assert old.calls == [ToolCall("calc", ARGUMENTS)] * 2
    with_number = parse("mistral", '[TOOL_CALLS]calc[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', NAMES)
    assert with_number.calls == [ToolCall("calc", {"a": 1})]


def test_a_turn_makes_a_bounded_number_of_calls():
    _, calls = parse("tags", "<calc>1</calc>" * 100, NAMES)
    assert len(calls) == MOST_CALLS + 1 and calls[-1].fault == f"only the first {MOST_CALLS} of 100 calls were made"
    assert parse("tags", "<calc>1</calc>", ()) == ("<calc>1</calc>", [])


@pytest.mark.parametrize("tool_format", FORMATS)
def test_hostile_texts_are_read_in_linear_time(tool_format):
    """A quadratic parser takes hours."""
    parts = [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ]
    parts += [*["{", "}", "[", '"name"', ":", ";", "<calc>", "</calc>", "<|python_tag|>"], "\ud800", "\x00", "é", " "]
    rng = random.Random(0)
    for part in parts:
        parse(tool_format, part * (10**6 // len(part)), NAMES)
    for _ in range(200):
        parse(tool_format, "".join(rng.choices(parts, k=rng.randrange(60))), NAMES)
