"""Environments of the package `verifiers`, which is optional: their agents call the policy's address.

`environment.kwargs` is verifiers' own `env` block: a taskset, and for each agent its harness and runtime; the taskset may be a file in
place of a package. The package runs the episode and scores it; here its rewards and metrics become those of a sample. `python -m rlx.environments.verifiers_agent` writes the
tasks as a data set.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rlx.environments.agent import Agent, past_proxies, require
from rlx.user_code import UserCodeError, load_module

RANGE = "verifiers>=0.4,<0.5"
KEY = "RLX_POLICY_TOKEN"
"""The variable with the key of the process's client, which all its samples share: their own tokens are the names of their models."""


class EpisodeFailed(Exception):
    """An episode without a result that can be trained on."""


def verifiers_agent(path: str | None, kwargs: dict[str, Any]) -> partial[Agent]:
    """Return what makes a sample's agent. Raises UserCodeError."""
    require("environment.name=verifiers", ("fastapi", "uvicorn"), "rlx[agents]")
    return partial(Agent, Episodes(load(path, kwargs)))


def load(path: str | None, kwargs: dict[str, Any]) -> Any:
    """Return verifiers' environment; `path` has its taskset if no package has it. Raises UserCodeError."""
    try:
        vf = importlib.import_module("verifiers.v1")
    except ImportError as fault:
        raise UserCodeError(f"environment.name=verifiers needs {RANGE} ({fault}); pip install '{RANGE}'") from fault
    block = json.loads(json.dumps(kwargs))  # a copy of its own, which verifiers changes
    if path is not None:
        name, module = Path(path).stem, load_module(path, "environment")
        if other := _other_module(name, str(module.__file__)):
            raise UserCodeError(
                f"environment.path: {path} has the name of the module {name} ({other}); rename the file"
            )
        sys.modules[name] = module
        block["taskset"] = {"id": name, **block.get("taskset", {})}
    try:
        return vf.load_environment(vf.resolve_env_config(block))
    except Exception as fault:
        raise UserCodeError(
            f"environment.kwargs: verifiers cannot load {kwargs} ({type(fault).__name__}: {fault}); expected its `env` block, such as "
            "taskset.id, agent.harness.id and agent.runtime.type, and the packages that it names"
        ) from fault


def _other_module(name: str, file: str) -> str | None:
    """Return where the module of this name is that a file would hide; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # of what a dotted name is in
        return None
    except ValueError:  # it is loaded and has no spec
        return "loaded"
    if spec is None or spec.origin is None or spec.name.startswith("rlx_user_"):
        return None
    return None if Path(spec.origin).resolve() == Path(file).resolve() else spec.origin


class Episodes:
    """Runs episodes of an environment, whose servers start with the first one and end with the process."""

    def __init__(self, environment: Any):
        self._environment = environment
        self._task: asyncio.Task[None] | None = None  # that has the servers
        self._are_up: asyncio.Future[None]

    async def __call__(self, row: dict[str, Any], url: str, token: str) -> dict[str, float]:
        """Run a row's task once; return its reward and metrics. Raises EpisodeFailed."""
        if self._task is None:
            os.environ.update(past_proxies(url, "127.0.0.1"))  # the package's own servers are there
            self._are_up = asyncio.get_running_loop().create_future()
            self._task = asyncio.ensure_future(self._serve())
        await asyncio.shield(self._are_up)
        vf = importlib.import_module("verifiers.v1")
        os.environ[KEY] = token
        client = vf.EvalClientConfig(base_url=url, api_key_var=KEY)  # the same for all: verifiers keeps each one open
        (slot,) = self._environment.slots(task_of(self._environment, row))
        return result_of(await self._environment.run_slot(slot, vf.ModelContext(token, client)), client)

    async def _serve(self) -> None:
        try:
            async with self._environment.serving():
                self._are_up.set_result(None)
                await asyncio.Event().wait()
        except Exception as fault:
            self._are_up.set_exception(fault)


def task_of(environment: Any, row: dict[str, Any]) -> Any:
    """Return the task of a row that `rows` has made."""
    kind = type(environment.taskset).task_type()
    text = (row.get("extra_info") or {}).get("task")
    if text is None:
        raise EpisodeFailed(
            "the row has no extra_info.task; write the data set by python -m rlx.environments.verifiers_agent"
        )
    return kind(kind.data_type().model_validate_json(text), environment.config.taskset.task)


def result_of(episode: Any, client: Any) -> dict[str, float]:
    """Return an episode's reward and metrics: means over its agents' runs. Raises EpisodeFailed."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed("; ".join(f"{each.type}: {each.message}" for each in errors) or "the episode is not ok")
    frozen = {each.agent.name for each in episode.traces if not each.agent.trainable}
    if calling := {each.agent.name for each in episode.traces if each.agent.config.client == client} & frozen:
        name = min(calling)
        raise EpisodeFailed(
            f"the agent {name!r} is not to be trained and calls the policy; set environment.kwargs.{name}.client and .model to another"
        )
    traces = [trace for trace in episode.traces if trace.agent.name not in frozen]
    if not traces:
        raise EpisodeFailed("no agent of the episode is to be trained")
    found: dict[str, list[float]] = defaultdict(list)
    several = len({trace.agent.name for trace in traces}) > 1
    for trace in traces:
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        for name, value in (trace.metrics | parts).items():
            if value is not None:
                found[f"{trace.agent.name}.{name}" if several else name].append(value)
    return {name: fmean(values) for name, values in found.items()} | {"reward": fmean(each.reward for each in traces)}


def rows(environment: Any, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the environment's tasks as rows of a data set. Raises UserCodeError."""
    taskset = environment.taskset
    if most is None and not taskset.bounded:
        raise UserCodeError(f"the taskset {taskset.config.id} never ends; give the number of rows")
    for task in islice(taskset, most):
        data = task.data
        text = data.model_dump_json()
        if type(data).model_validate_json(text) != data:
            raise UserCodeError(f"task {data.idx} of {taskset.config.id} is not the same after a way through JSON")
        prompt, said = data.prompt or "", [("system", data.system_prompt)] * bool(data.system_prompt)
        for role, content in [("user", prompt)] if isinstance(prompt, str) else [(m.role, m.content) for m in prompt]:
            # Its length is what the data set's filter reads.
            parts = [content] if isinstance(content, str) else [getattr(part, "text", "") for part in content or ()]
            said.append((role, "\n".join(parts)))
        yield {
            "data_source": f"verifiers/{taskset.config.id}",
            "prompt": [{"role": role, "content": content} for role, content in said],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"task": text},
        }


def main() -> None:
    """Run with the file to write, the taskset's package or file, and the most rows if it is not all."""
    if not 3 <= len(sys.argv) <= 4:
        sys.exit("usage: python -m rlx.environments.verifiers_agent FILE TASKSET [ROWS]")
    path, taskset, *most = sys.argv[1:]
    is_file = taskset.endswith(".py")
    environment = load(taskset, {}) if is_file else load(None, {"taskset": {"id": taskset}})
    found = [json.dumps(row) for row in rows(environment, int(most[0]) if most else None)]
    Path(path).write_text("".join(f"{row}\n" for row in found))
    print(f"{len(found)} rows in {path}")


if __name__ == "__main__":
    main()
