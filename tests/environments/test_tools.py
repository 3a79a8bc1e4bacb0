"""Tools from functions: schema, checked arguments, results and errors that the model reads."""

import asyncio

import pytest

from rlx.environments.protocol import Turn
from rlx.environments.tool_calls import ToolCall
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
