"""Tools from Python functions, and the environment that answers a model's calls of them.

transformers makes a tool's JSON schema from the function's type hints and docstring; jsonschema checks arguments against it.
"""

import inspect
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jsonschema

from rlx.environments.protocol import Message, Observation, Turn
from rlx.environments.tool_calls import FORMATS, ToolCall, parse
from rlx.processes.lines import shallow
from rlx.user_code import UserCodeError

LONGEST_RESULT = 2**17
"""Longest result of a tool to keep [characters]; the run's own limit, in tokens, is lower."""


class _Tool(NamedTuple):
    function: Callable[..., Any]
    parameters: dict[str, Any]  # JSON schema of an object
    validator: jsonschema.Draft202012Validator


class Tools:
    """Functions that a model may call, async or not, with type hints and a docstring in Google's style for each argument.

    Raises UserCodeError that names all functions without a schema, or if two have one name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]):
        self.schemas: list[dict[str, Any]] = []
        faults = []
        for function in functions:
            try:
                self.schemas.append(_schema(function))
            except UserCodeError as fault:
                faults.append(str(fault))
        if faults:
            raise UserCodeError("\n".join(faults))
        described = [schema["function"] for schema in self.schemas]
        self._tools = {}
        for function, each in zip(functions, described, strict=True):
            schema = {**_standard(each["parameters"]), "additionalProperties": False}
            validator = jsonschema.Draft202012Validator(schema)
            self._tools[each["name"]] = _Tool(function, each["parameters"], validator)
        if len(self._tools) < len(functions):
            names = [each["name"] for each in described]
            raise UserCodeError(f"tools: got {names}, expected a name of its own for each")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def read(self, call: ToolCall) -> tuple[dict[str, Any], str]:
        """Return a call's arguments with the types of the schema, and what is wrong with the call; empty if nothing is."""
        if call.fault:
            return {}, f"the call cannot be read: {call.fault}"
        if call.name not in self._tools:
            return {}, f"there is no tool {call.name[:100]!r}, only {', '.join(self.names)}"
        tool = self._tools[call.name]
        properties = tool.parameters.get("properties", {})
        arguments = arguments_of(call, properties)
        if arguments is None:
            return {}, f"expected a JSON object of the arguments {', '.join(properties)}"
        fault = next(tool.validator.iter_errors(arguments), None)
        if fault is None:
            return arguments, ""
        where = f"argument {fault.path[0]!r}: " if fault.path else ""
        return {}, f"{where}{fault.message[:300]}"

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Make a call; return its result or its error as text for the model, and whether it is an error. UserCodeError ends the row."""
        arguments, fault = self.read(call)
        if fault:
            return f"error: {fault}", True
        try:
            value = self._tools[call.name].function(**arguments)
            value = await value if inspect.isawaitable(value) else value
            text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        except (MemoryError, UserCodeError):  # no fault of the model's
            raise
        except Exception as error:
            return _cut(f"error: {type(error).__name__}: {error}"), True
        return _cut(text), False


class ToolEnvironment:
    """Answers the calls of each turn; a turn without calls ends the conversation, and reward functions score it.

    `tool_format` is how the model writes calls, of `rlx.environments.tool_calls.FORMATS`.
    """

    def __init__(self, tools: Tools, tool_format: str):
        if tool_format not in FORMATS:
            raise UserCodeError(f"tool_format: got {tool_format!r}, expected one of {', '.join(FORMATS)}")
        self._tools, self._format = tools, tool_format

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._tools.schemas

    def reset(self, row: dict[str, Any]) -> list[Message]:
        return row["prompt"]  # type: ignore[no-any-return]

    async def step(self, turn: Turn) -> Observation:
        content, calls = parse(self._format, turn.text, self._tools.names)
        if not calls:
            return Observation([], done=True, info={"calls": [], "tool_calls": 0, "tool_errors": 0})
        messages, made = [], []
        for place, call in enumerate(calls):  # one after the other, because a call may depend on the effect of another
            before = time.monotonic()
            text, error = await self._tools.call(call)
            made.append({"name": call.name[:100], "error": error, "seconds": time.monotonic() - before})
            number = call_id(turn, place)
            messages.append({"role": "tool", "name": call.name[:100], "tool_call_id": number, "content": text})
        info = {"calls": made, "tool_calls": len(made), "tool_errors": sum(each["error"] for each in made)}
        # If a call cannot be read, the template gets the plain text
        is_plain = any(call.fault or isinstance(call.arguments, str) for call in calls)
        return Observation(messages, info=info, assistant=None if is_plain else with_calls(content, calls, turn))


def arguments_of(call: ToolCall, properties: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments with the types of these schemas; None if its text is no JSON object."""
    arguments = call.arguments
    if isinstance(arguments, str):
        arguments = {next(iter(properties)): arguments} if len(properties) == 1 else json_or_text(arguments)
        if not isinstance(arguments, dict):
            return None
    if isinstance(call.arguments, str) or call.as_text:
        return {name: _typed(value, properties.get(name, {})) for name, value in arguments.items()}
    return arguments


def call_id(turn: Turn, place: int) -> str:
    """Return the number of a turn's call: nine letters and digits, as Mistral's template wants it."""
    return f"call{turn.index % 1000:03d}{place:02d}"


def called(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": number, "function": {"name": name, "arguments": arguments}}


def with_calls(content: str, calls: Sequence[ToolCall], turn: Turn) -> Message:
    """Return the turn as chat templates want it."""
    made = [called(call_id(turn, place), call.name, call.arguments) for place, call in enumerate(calls)]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # late: not every environment has tools, and it takes a second

    try:
        return get_json_schema(function)  # type: ignore[no-any-return]
    except Exception as fault:  # of several types, none of which is public
        raise UserCodeError(
            f"tool {getattr(function, '__name__', function)!r} has no schema: {fault}; give each argument a type and, in the "
            'docstring under "Args:", a description'
        ) from fault


def _standard(schema: Any) -> Any:
    """Return a schema with null as a type in place of OpenAPI's `nullable`, which JSON schema does not have."""
    if isinstance(schema, list):
        return [_standard(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _standard(value) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def json_or_text(text: str) -> Any:
    """Return the JSON value that a text is, else the text, also of one that is nested too deep."""
    try:
        return shallow(json.loads(text))
    except (ValueError, RecursionError):
        return text


def _typed(value: Any, schema: dict[str, Any]) -> Any:
    """Return the JSON value that a text is, unless the schema wants text."""
    if not isinstance(value, str) or schema.get("type") in ("string", None):
        return value
    python = {"True": True, "False": False, "None": None}
    return python.get(value.strip(), json_or_text(value))


def _cut(text: str) -> str:
    if len(text) <= LONGEST_RESULT:
        return text
    return f"{text[:LONGEST_RESULT]}… (cut: {len(text):,} characters)"
