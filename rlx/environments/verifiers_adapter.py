"""Environments of the package `verifiers`, which is optional.

A verifiers environment asks a client for each turn. Here the client waits for rlx's sampler: it hands the messages out as an
observation, and answers with the turn that rlx sends. The environment's rubric gives the reward at the end.

It is the interface `verifiers.load_environment` with `Environment.run_rollout` and `Client`, of verifiers 0.2 and 0.3 (tested with 0.2.1). Version 0.4
has another one, in which agents are programs that speak to a server. Environments that score groups of samples are not supported.
"""

import asyncio
import importlib
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from rlx.environments.protocol import Message, Observation, Turn
from rlx.environments.tool_calls import parse
from rlx.environments.tools import call_id, with_calls
from rlx.user_code import UserCodeError

VERIFIERS_RANGE = "verifiers>=0.2,<0.4"


@cache
def _load(env_id: str, arguments: str) -> Any:
    """Return the environment, once in a process. Raises UserCodeError."""
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as fault:
        raise UserCodeError(
            f"environment.name=verifiers needs the package verifiers ({fault}); pip install '{VERIFIERS_RANGE}'"
        ) from fault
    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "of this machine")
        raise UserCodeError(
            f"verifiers {version} has no load_environment, expected {VERIFIERS_RANGE}; pip install '{VERIFIERS_RANGE}'"
        )
    try:
        return verifiers.load_environment(env_id, **json.loads(arguments))
    except Exception as fault:
        raise UserCodeError(
            f"environment.kwargs.env_id: verifiers cannot load {env_id!r} ({type(fault).__name__}: {fault}); install its package, and "
            "correct environment.kwargs.args"
        ) from fault


def _text(arguments: dict[str, Any] | None) -> str:
    return json.dumps(arguments or {}, sort_keys=True)


class Verifiers:
    """One rollout of a verifiers environment.

    Args:
        env_id: of the environment, as `verifiers.load_environment` has it; its package is installed.
        args: arguments of its `load_environment`.
        tool_format: how the model writes calls, of `rlx.environments.tool_calls.FORMATS`.
    """

    def __init__(self, env_id: str, args: dict[str, Any] | None = None, tool_format: str = "tags"):
        self._environment, self._format = _load(env_id, _text(args)), tool_format
        self._asked: asyncio.Queue[tuple[list[Message], list[Any]]] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None
        self._known = 0  # messages that the model has read or written
        self.tools: list[dict[str, Any]] = []

    @staticmethod
    def prepare(env_id: str, args: dict[str, Any] | None = None, tool_format: str = "tags") -> None:
        """Load the environment once in a process. Raises UserCodeError."""
        _load(env_id, _text(args))

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        """See Environment. `extra_info` of a row is the environment's `info`, with its `example_id`."""
        info = dict(row.get("extra_info") or {})
        given = {
            "prompt": row["prompt"],
            "answer": row["ground_truth"],
            "example_id": info.pop("example_id", 0),
            "info": info,
        }
        client = _client_class()(self._asked, self._answers)
        self._rollout = asyncio.ensure_future(self._environment.run_rollout(given, client, "rlx", {}))
        messages, tools = await self._next() or ([], [])
        self._known = len(messages)
        self.tools = [{"type": "function", "function": _plain(tool)} for tool in tools]
        return messages

    async def step(self, turn: Turn) -> Observation:
        """See Environment."""
        content, calls = parse(self._format, turn.text, [tool["function"]["name"] for tool in self.tools])
        readable = [call for call in calls if not call.fault and isinstance(call.arguments, dict)]
        made = [
            {"id": call_id(turn, place), "name": call.name, "arguments": json.dumps(call.arguments)}
            for place, call in enumerate(readable)
        ]
        self._answers.put_nowait((content if made else turn.text, made, turn))
        info = {"tool_calls": len(calls), "tool_errors": len(calls) - len(readable)}
        asked = await self._next()
        if asked is None:
            return self._ended(info)
        messages = asked[0][self._known + 1 :]  # behind the turn itself
        self._known = len(asked[0])
        return Observation(messages, info=info, assistant=with_calls(content, readable, turn) if made else None)

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()

    async def _next(self) -> tuple[list[Message], list[Any]] | None:
        """Return the messages and tools of the next request for a turn; None if the rollout has ended."""
        assert self._rollout is not None, "reset comes first"
        request = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            messages, tools = request.result()
            return [_plain(message) for message in messages], tools
        request.cancel()
        return None

    def _ended(self, info: dict[str, Any]) -> Observation:
        assert self._rollout is not None, "reset comes first"
        output = dict(self._rollout.result())
        if output.get("error"):
            raise RuntimeError(f"the verifiers environment failed: {output['error']}")
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        return Observation([], float(output["reward"] or 0.0), done=True, info=metrics | info)


@cache
def _client_class() -> type:
    """Return a client of verifiers that hands prompts out and waits for turns."""
    base = importlib.import_module("verifiers.clients").Client
    types = importlib.import_module("verifiers.types")

    class Waiting(base):  # type: ignore[misc]
        def __init__(self, asked: "asyncio.Queue[Any]", answers: "asyncio.Queue[Any]"):
            super().__init__(None)
            self._asked, self._answers = asked, answers

        async def get_response(self, prompt: Any, model: str, tools: Any = None, **_: Any) -> Any:
            self._asked.put_nowait((prompt, tools or []))
            content, calls, turn = await self._answers.get()
            cut = turn.finish_reason == "length"
            message = types.ResponseMessage(
                content=content,
                tool_calls=[types.ToolCall(**call) for call in calls] or None,
                finish_reason="length" if cut else "tool_calls" if calls else "stop",
                is_truncated=cut,
            )
            return types.Response(id="rlx", created=int(time.time()), model=model, message=message)

    # The rest of the interface is of clients that send requests, and never called.
    Waiting.__abstractmethods__ = frozenset()
    return Waiting


def _plain(message: Any) -> dict[str, Any]:
    found = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    return {name: value for name, value in found.items() if value is not None}


def write_rows(env_id: str, path: Path, arguments: dict[str, Any]) -> int:
    """Write the environment's data set as JSON lines that `data.train_files` takes; return the number of rows."""
    rows = _load(env_id, _text(arguments)).get_dataset()
    with path.open("w") as file:
        for place, row in enumerate(rows):
            info = row.get("info") or {}
            info = json.loads(info) if isinstance(info, str) else info
            extra = {**info, "example_id": row.get("example_id", place)}
            written = {"data_source": f"verifiers/{env_id}", "prompt": row["prompt"], "extra_info": extra}
            truth = {"style": "rule", "ground_truth": str(row.get("answer") or "")}
            file.write(json.dumps({**written, "reward_model": truth}) + "\n")
    return len(rows)


def main() -> None:
    """Run with the environment's id, the file to write and perhaps its arguments as JSON."""
    env_id, path, *more = sys.argv[1:]
    print(f"{write_rows(env_id, Path(path), json.loads(more[0]) if more else {})} rows in {path}")


if __name__ == "__main__":
    main()
