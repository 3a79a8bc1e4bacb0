"""Tools from functions, and calls in the formats of models, which are read in a time linear in the text."""

import asyncio
import json
import random

import pytest

from rlx.environments.protocol import Turn
from rlx.environments.tool_calls import FORMATS, MOST_CALLS, ToolCall, parse
from rlx.environments.tools import LONGEST_RESULT, ToolEnvironment, Tools
from rlx.user_code import UserCodeError


def look_up(word: str, most: int = 3, strict: bool | None = None) -> list[str]:
    """Look a word up.

    Args:
        word: to look up.
        most: number of meanings.
        strict: whether the case counts.
    """
    if word == "raise":
        raise KeyError(word)
    if word == "long":
        return "y" * 10**6
    return [f"{word}{place}{strict}" for place in range(most)]


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: to wait.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def run(tools, *calls):
    async def all_of_them():
        return [await tools.call(call) for call in calls]

    return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def tools():
    return Tools([look_up, wait])


def test_a_function_gives_the_schema_that_chat_templates_read(tools):
    schema = tools.schemas[0]["function"]
    assert schema["name"] == "look_up" and schema["description"] == "Look a word up."
    assert schema["parameters"]["required"] == ["word"]
    assert schema["parameters"]["properties"]["most"] == {"type": "integer", "description": "number of meanings."}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ToolCall("look_up", {"word": "a", "most": 1}), '["a0None"]'),
        (ToolCall("look_up", {"word": "a", "most": 1, "strict": None}), '["a0None"]'),
        (ToolCall("look_up", {"word": "7", "most": "1", "strict": "true"}, as_text=True), '["70True"]'),
        (ToolCall("look_up", '{"word": "é", "most": 1}'), '["é0None"]'),
        (ToolCall("wait", "0.01"), "waited 0.01"),
        (ToolCall("wait", {"seconds": 0}), "waited 0"),
    ],
)
def test_calls(tools, call, expected):
    assert run(tools, call) == [(expected, False)]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ToolCall("", {}, "it has no end"), "error: the call cannot be read: it has no end"),
        (ToolCall("lookup", {}), "error: there is no tool 'lookup', only look_up, wait"),
        (ToolCall("look_up", {}), "error: 'word' is a required property"),
        (ToolCall("look_up", {"word": 3}), "error: argument 'word': 3 is not of type 'string'"),
        (ToolCall("look_up", {"word": "a", "most": "1"}), "error: argument 'most': '1' is not of type 'integer'"),
        (
            ToolCall("look_up", {"word": "a", "x": 1}),
            "error: Additional properties are not allowed ('x' was unexpected)",
        ),
        (ToolCall("look_up", "a"), "error: expected a JSON object of the arguments word, most, strict"),
        (ToolCall("wait", "soon"), "error: argument 'seconds': 'soon' is not of type 'number'"),
        (ToolCall("look_up", {"word": "raise"}), "error: KeyError: 'raise'"),
    ],
)
def test_errors_are_told_to_the_model(tools, call, expected):
    [(text, error)] = run(tools, call)
    assert error and text.startswith(expected)


def test_long_results_are_cut(tools):
    [(text, error)] = run(tools, ToolCall("look_up", {"word": "long"}))
    assert not error and text == "y" * LONGEST_RESULT + "… (cut: 1,000,000 characters)"


def test_functions_without_a_schema_are_refused():
    def bare(word):
        """Look."""

    def silent(word: str):
        pass

    with pytest.raises(UserCodeError, match=r"(?s)tool 'bare' has no schema.*\ntool 'silent' has no schema"):
        Tools([bare, wait, silent])
    with pytest.raises(UserCodeError, match="expected a name of its own for each"):
        Tools([wait, wait])
    with pytest.raises(UserCodeError, match="tool_format: got 'xml', expected one of tags, hermes"):
        ToolEnvironment(Tools([wait]), "xml")


def test_the_environment_answers_each_call_and_ends_at_a_turn_without_one(tools):
    environment = ToolEnvironment(tools, "hermes")
    row = {"prompt": [{"role": "user", "content": "?"}]}
    assert environment.reset(row) == row["prompt"] and environment.tools == tools.schemas
    text = 'So <tool_call>{"name": "wait", "arguments": {"seconds": 0}}</tool_call>'
    first = asyncio.run(environment.step(Turn(text + text.replace("wait", "stay"), 2)))
    assert [message["content"] for message in first.messages] == [
        "waited 0",
        "error: there is no tool 'stay', only look_up, wait",
    ]
    assert first.assistant["content"] == "So So" and not first.done and first.reward is None
    assert [call["id"] for call in first.assistant["tool_calls"]] == [
        message["tool_call_id"] for message in first.messages
    ]
    assert (first.info["tool_calls"], first.info["tool_errors"]) == (2, 1)
    assert [(call["name"], call["error"]) for call in first.info["calls"]] == [("wait", False), ("stay", True)]
    unread = asyncio.run(environment.step(Turn("<tool_call>{</tool_call>", 3)))
    assert unread.assistant is None and "cannot be read" in unread.messages[0]["content"]
    last = asyncio.run(environment.step(Turn("It is 7.", 4)))
    assert last.done and last.messages == [] and last.info["tool_calls"] == 0


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
    parts = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"]
    parts += ["[TOOL_CALLS]", "[ARGS]"]
    parts += [*["{", "}", "[", '"name"', ":", ";", "<calc>", "</calc>", "<|python_tag|>"], "\ud800", "\x00", "é", " "]
    rng = random.Random(0)
    for part in parts:
        parse(tool_format, part * (10**6 // len(part)), NAMES)
    for _ in range(200):
        parse(tool_format, "".join(rng.choices(parts, k=rng.randrange(60))), NAMES)
