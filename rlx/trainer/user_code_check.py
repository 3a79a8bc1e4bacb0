"""Try a user's own code before anything starts.

A separate process imports each file and then ends. The driver is safe from an import that claims device memory, starts threads,
crashes or hangs. This module imports little, because it runs before torch and Ray are loaded.
"""

import re
import reprlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlx.config.check.folders import is_python_file
from rlx.config.check.validate import Verdict
from rlx.config.faults import Fault
from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_environment, model_scores_alone
from rlx.data.files import DataError, Prompt
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.protocol import Failure
from rlx.environments.spec import EnvironmentSpec, environment_spec
from rlx.errors import wrapped
from rlx.processes.pool import LOAD_LIMIT_S, Loadable
from rlx.program import program
from rlx.rewards.function import BATCHED, KEY, SINGLE, Function, own_function
from rlx.rewards.scoring_pool import NotSendable, RewardCall, ScoringPool
from rlx.trainer.data_check import first_training_prompt
from rlx.user_code import DATASET, POLICY_LOSS, ImportFailed, Interface, UserCodeError, load_callable

SILENT_S = 5.0  # of an import, after which the check says what it waits for
TRIAL_LIMIT_S = 5.0
"""For the call of a reward function. A slower one, such as a judge, is fine in training, but must not delay `rlx check`."""


@dataclass(frozen=True, eq=False)
class Named:
    """Code that rlx calls by position: a policy loss or a dataset class. See Loadable."""

    source: str
    name: str
    interface: Interface

    def load(self) -> Callable[..., Any]:
        return load_callable(self.source, self.name, self.interface)


class UserCode(NamedTuple):
    """A function or class of the user."""

    what: str  # its description in messages
    keys: tuple[str, ...]  # the keys that configure it, `path` and `name` first
    code: Loadable  # the object to load
    expected: str  # its signature in words
    memory_limit_gb: float | None = None  # memory that the process may allocate [10^9 bytes]; None: no limit
    in_workers: bool = False  # whether workers import it instead of the driver
    trial: RewardCall | None = None  # a call to try
    row: dict[str, Any] | None = None  # for the `reset` of an environment, to try


def check_user_code(config: PPOConfig, broken: frozenset[str], machine: Machine) -> Verdict:
    """Import the user's reward function, environment, policy loss and dataset class, and check that rlx can call them.

    The reward function scores the ground truth of the first training row as if it were a response. Any response may come in
    training, so an error is a fault, or a warning where errors score 0; so is a long call. The environment begins a conversation
    with that row; a failure is a fault if it would end the run, else a warning.

    Missing files are reported by a rule of the configuration and skipped here. Code of `broken` keys, which could not be read,
    is not tried. If the run uses accelerators and this machine has none, a failed import of a policy loss is only a warning:
    the workers' machines may have its packages.
    """
    faults, warnings = [], []
    for own in _of(config):
        if not broken.isdisjoint(own.keys):
            continue
        try:
            failure = _tried(own)
            if failure is not None:
                kind, what = failure
                if kind != "timeout" and _stops(config, own, kind):
                    faults.append(_failed(own, what, kind))
                else:
                    warnings.append(f"{own.what}, tried with the first training row, {what}")
        except UserCodeError as error:
            elsewhere = own.in_workers and on_accelerator(config, machine) and not machine.gpus
            if elsewhere and isinstance(error, ImportFailed):
                warnings.append(f"{own.what} cannot be imported on this machine, which has no GPU: {error}")
                continue
            named = [key for key in own.keys if key in str(error)] or own.keys[:2]
            remedy = f"correct the file or {' or '.join(named)}"
            faults.append(Fault(f"{own.what} cannot be used", str(error), own.expected, remedy, own.keys))
    return Verdict(tuple(faults), tuple(warnings))


@contextmanager
def _told_after(seconds: float, what: str) -> Iterator[None]:
    """Say what the check waits for if it still does after some seconds."""
    limit = f"; it may take {LOAD_LIMIT_S:g} s"
    timer = threading.Timer(seconds, lambda: print(wrapped(what + limit), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _of(config: PPOConfig) -> Iterator[UserCode]:
    """Yield the configured functions and classes whose files exist."""
    prompt = None
    with suppress(DataError):  # `check_data` reports it
        prompt = first_training_prompt(config)
    reward = own_function(config.reward, config.custom_reward_function)
    if reward is not None and is_python_file(reward.source):
        reward = replace(reward, limit_s=min(reward.limit_s, TRIAL_LIMIT_S))
        keys = (f"{KEY}.path", f"{KEY}.name", f"{KEY}.reward_kwargs", "reward.reward_manager.name")
        parameters = (*(BATCHED if reward.batched else SINGLE), *reward.options)
        expected = f"{reward.name}({', '.join(parameters)}), called by keyword"
        memory_limit_gb, trial = config.reward.memory_limit_gb, _trial(config, reward, prompt)
        yield UserCode("the reward function of your own", keys, reward, expected, memory_limit_gb, trial=trial)
    own = config.environment
    if has_environment(config) and (own.path is None or is_python_file(own.path)):
        keys = ("environment.path", "environment.name", "environment.kwargs")
        expected = "the name of an environment of rlx, or of a class, a tool or a list of tools in environment.path"
        row = None if prompt is None else _row(prompt)
        yield UserCode("the environment", keys, environment_spec(config), expected, own.memory_limit_gb, row=row)
    loss, dataset = config.actor_rollout_ref.actor.policy_loss, config.data.custom_cls
    if loss.path is not None and is_python_file(loss.path):
        yield _by_position("the policy loss of your own", loss.path, loss.name, POLICY_LOSS, in_workers=True)
    if dataset.path is not None and dataset.name is not None and is_python_file(dataset.path):
        yield _by_position("the dataset class of your own", dataset.path, dataset.name, DATASET)


def _trial(config: PPOConfig, function: Function, prompt: Prompt | None) -> RewardCall | None:
    """Return a call with the first training row; None if there is no such row, or training gives the function more than a row."""
    sources = config.custom_reward_function.data_sources
    if prompt is None or has_environment(config) or model_scores_alone(config):
        return None
    if sources and prompt.data_source not in sources:
        return None
    values = (prompt.data_source, str(prompt.ground_truth), prompt.ground_truth, prompt.extra_info)
    if function.batched:
        return RewardCall(function, dict(zip(BATCHED, ([value] for value in values), strict=True)))
    return RewardCall(function, dict(zip(SINGLE, values, strict=True)))


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return a training row as an environment gets it."""
    content = prompt.content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    given = {name: getattr(prompt, name) for name in ("data_source", "ground_truth", "extra_info")}
    return {"prompt": messages, **given, "seed": 0}


def _tried(own: UserCode) -> tuple[str, str] | None:
    """Import the code and try it; return the kind of a failure and what happened. Raises UserCodeError."""
    with _told_after(SILENT_S, f"{program('check')}: the import of {own.what} is not done yet"):
        if own.row is not None and isinstance(own.code, EnvironmentSpec):
            return _reset_failure(own.code, own.row, own.memory_limit_gb)
        with ScoringPool(1, own.memory_limit_gb, at_once=1) as pool:
            pool.check(own.code)
            return None if own.trial is None else _failure(pool, own.trial)


def _stops(config: PPOConfig, own: UserCode, kind: str) -> bool:
    """Whether such a failure in a run would stop it."""
    if own.row is not None:
        return config.environment.on_failure == "end_run"
    return (config.reward.on_error if kind == "error" else config.reward.on_crash) == "stop"


def _reset_failure(spec: EnvironmentSpec, row: dict[str, Any], memory_limit_gb: float | None) -> tuple[str, str] | None:
    with EnvironmentPool(spec, 1, memory_limit_gb) as pool:  # with its own limit, as in a run
        pool.reset(0, row)
        while not (answers := pool.poll(1.0)):
            pass
    _, answer = answers[0]
    return (answer.kind, answer.reason) if isinstance(answer, Failure) else None


def _failure(pool: ScoringPool, call: RewardCall) -> tuple[str, str] | None:
    """Return the kind of a failure (`Kind`) and what happened; None if the call returns a score."""
    try:
        (outcome,), _ = pool.run([call])
    except NotSendable as error:
        return "error", f"cannot be sent the row ({error.__cause__})"
    if outcome.kind == "timeout":
        return "timeout", f"took longer than {call.function.limit_s:g} s for one response"
    if outcome.kind:
        lines = re.findall(r", line (\d+)", outcome.traceback)
        return outcome.kind, outcome.fault + (f" (line {lines[-1]})" if lines else "")
    (answer,) = outcome.answers
    return ("error", answer) if isinstance(answer, str) else None


def _failed(own: UserCode, what: str, kind: str) -> Fault:
    if own.trial is None:
        got, expected = f"with the first training row, its reset {what}", "a list of messages"
        return Fault(f"{own.what} fails", got, expected, "correct it, or set environment.on_failure=end_row", own.keys)
    response = own.trial.arguments.get(SINGLE[1], own.trial.arguments.get(BATCHED[1]))
    key = "reward.on_error" if kind == "error" else "reward.on_crash"
    remedy = f"correct the function, or let such samples score 0: {key}=zero"
    got = f"with the first training row and its ground truth as the response, {reprlib.repr(response)}, it {what}"
    return Fault(f"{own.what} fails", got, "a finite number, or a dict whose `score` is one", remedy, own.keys)


def _by_position(what: str, path: str, name: str, interface: Interface, in_workers: bool = False) -> UserCode:
    keys, expected = (f"{interface.key}.path", f"{interface.key}.name"), f"{name}({', '.join(interface.parameters)})"
    return UserCode(what, keys, Named(path, name, interface), expected, in_workers=in_workers)
