"""The agent of a sample: a user's function, or a command. Both call the policy at an address. It lives in an environment process."""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlx.environments.protocol import Message, Observation, Turn
from rlx.processes.child import end_with, in_words
from rlx.user_code import UserCodeError, load_name, misfit

PACKAGES = ("fastapi", "uvicorn", "openai")
LONGEST_TAIL = 2000  # characters of a command's output that a failure shows
LOOK_S, LAST_OUTPUT_S = 0.1, 1.0  # between looks whether a command has ended, and then for its last output
MOST_THREADS = 1024
"""Calls of `asyncio.to_thread` at a time: an agent that waits in one must not hold up the others."""


class CommandFailed(Exception):
    """A command ended with another exit code than 0, or wrote no JSON."""


def agent(path: str | None, kwargs: dict[str, Any]) -> Callable[[], "Agent"]:
    """Return what makes a sample's agent: the function `run` of a file, or the command in `kwargs`. Raises UserCodeError."""
    require("environment.name=endpoint", PACKAGES, "rlx[agents]")
    if path is None:
        return partial(Agent, partial(_run_command, _command(kwargs)))
    importlib.import_module("openai")  # now: it takes a second, which would count as the first agent's
    run = load_name(path, "run", "environment")
    fault = misfit(run, ("row", "client"), tuple(kwargs))
    if fault is not None or not inspect.iscoroutinefunction(run):
        raise UserCodeError(
            f"environment.path: run in {path} is {run!r}, expected `async def run(row, client)` that also takes "
            f"environment.kwargs ({fault or 'it is not async'}); await asyncio.to_thread(…) calls code that is not async"
        )
    return partial(Agent, partial(_run_function, run, kwargs))


def require(key: str, packages: Sequence[str], remedy: str) -> None:
    """Raise UserCodeError if a package is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserCodeError(f"{key} needs {', '.join(missing)}; pip install '{remedy}'")


def _command(kwargs: dict[str, Any]) -> list[str]:
    command = kwargs.get("command")
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as fault:
        got = f"environment.kwargs.command: got {command!r}, expected words as in a shell"
        raise UserCodeError(f"{got} ({fault}); correct it, or give a list of words") from None
    if set(kwargs) != {"command"} or not isinstance(words, list) or not words:
        raise UserCodeError(
            f"environment.kwargs: got {kwargs}, expected command alone: a text or a list of words; or set environment.path to a "
            "Python file with `async def run(row, client)`"
        )
    words = [str(word) for word in words]
    if shutil.which(words[0]) is None:
        raise UserCodeError(
            f"environment.kwargs.command: there is no program {words[0]!r} on PATH; correct it or install it"
        )
    return words


class Agent:
    """A sample's agent as an environment: its only step is the whole agent.

    Args:
        run: gets the row, the address and the token; returns the reward, None, or a dict with `reward` and metrics.
    """

    def __init__(self, run: Callable[..., Any]):
        self._run, self._row, self._access = run, {}, ()

    def reset(self, row: dict[str, Any]) -> list[Message]:
        self._access, self._row = row.pop("endpoint", ()), row
        return row["prompt"]

    async def step(self, turn: Turn) -> Observation:
        result = await self._run(self._row, *self._access)
        info = dict(result) if isinstance(result, dict) else {"reward": result}
        return Observation([], info.pop("reward", None), done=True, info=info)


async def _run_function(
    run: Callable[..., Any], kwargs: dict[str, Any], row: dict[str, Any], url: str, token: str
) -> Any:
    import openai

    client = openai.AsyncOpenAI(base_url=url, api_key=token, http_client=_connections(), timeout=None)
    return await run(row, client, **kwargs)


@cache
def _connections() -> Any:
    """Return the connections that all clients of the process share, which none of them closes."""
    import openai

    class Shared(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]
        async def aclose(self) -> None:
            pass

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS))
    return Shared(timeout=None, trust_env=False)


def past_proxies(url: str, *hosts: str) -> dict[str, str]:
    """Return environment variables with which HTTP clients call an address and hosts without a proxy."""
    names = ("NO_PROXY", "no_proxy")
    known = [each.strip() for name in names for each in os.environ.get(name, "").split(",")]
    # Programs read "*" only alone
    different: Iterable[str | None] = ["*"] if "*" in known else dict.fromkeys([*known, *hosts, urlsplit(url).hostname])
    return dict.fromkeys(names, ",".join(filter(None, different)))


async def _run_command(command: list[str], row: dict[str, Any], url: str, token: str) -> Any:
    """Run a command with the row in the file RLX_ROW; it may write its result into the file RLX_RESULT."""
    with tempfile.TemporaryDirectory(prefix="rlx-agent-") as folder:
        given, result = Path(folder) / "row.json", Path(folder) / "result.json"
        given.write_text(json.dumps(row))
        own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": token, "RLX_ROW": str(given), "RLX_RESULT": str(result)}
        own |= past_proxies(url)
        process = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | own,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
            preexec_fn=partial(end_with, os.getpid()),
        )
        tail = bytearray()
        reading = asyncio.ensure_future(_keep_end(process.stdout, tail))
        try:
            while (code := process.returncode) is None:  # `wait` also waits for all that hold its output open
                await asyncio.sleep(LOOK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            await asyncio.wait({reading}, timeout=LAST_OUTPUT_S)
            reading.cancel()
        if code:
            raise CommandFailed(f"the command ended with {in_words(code)}: {tail.decode(errors='replace').strip()}")
        try:
            return json.loads(result.read_text()) if result.exists() else None
        except (ValueError, RecursionError) as fault:
            raise CommandFailed(
                f"RLX_RESULT is no JSON ({fault}), expected a number or an object with `reward`"
            ) from None


async def _keep_end(output: asyncio.StreamReader | None, tail: bytearray) -> None:
    while output is not None and (part := await output.read(2**16)):
        tail[:] = (tail + part)[-LONGEST_TAIL:]
