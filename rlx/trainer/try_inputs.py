"""Try data files, model folders and the user's code before anything starts.

Of data files this reads the first row of each, and counts the rows; of model folders the JSON files, the tokenizer's name and the
headers of the weights. `rlx.trainer.start` reads the rest, which needs torch and transformers. A separate process imports each file
of the user's code and then ends, so the driver is safe from an import that claims device memory, starts threads, crashes or hangs.
"""

import json
import re
import reprlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlx.checkpoint.manifest import CheckpointError, few, read_json
from rlx.config.check.folders import is_python_file, is_url
from rlx.config.check.validate import Verdict
from rlx.config.faults import Fault
from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema import ARITHMETIC, MODEL_JSON_FILES, PLAIN_SOURCE, TOKENIZER_FILES, PPOConfig, roles
from rlx.data.files import (
    DataError,
    FormError,
    Prompt,
    RowFault,
    RowFaults,
    form_of,
    parts_of,
    prompts_of,
    require_prompts,
    to_prompt,
)
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.protocol import Failure
from rlx.environments.spec import EnvironmentSpec, environment_spec
from rlx.errors import wrapped
from rlx.processes.pool import LOAD_LIMIT_S, Loadable
from rlx.program import program
from rlx.rewards.function import BATCHED, KEY, SINGLE, Function, own_parts
from rlx.rewards.rules import no_function_for, remedy_for, scored_sources
from rlx.rewards.scoring_pool import NotSendable, RewardCall, ScoringPool
from rlx.row_files import DATA_KINDS, SAVED, data_kind, data_parts
from rlx.user_code import DATASET, POLICY_LOSS, ImportFailed, Interface, UserCodeError, load_callable

SPLITS = {"train": "data.train_files", "val": "data.val_files"}
COLUMN_KEYS = ("data.prompt_key", "data.answer_key", "data.reward_fn_key")
SCORING_KEYS = (
    *("custom_reward_function.path", "custom_reward_function.parts", "custom_reward_function.data_sources"),
    *("reward_model.enable", "reward_model.rule_weight"),
    *("environment.name", "environment.path", "environment.rewards"),
)
"""The keys that decide which data sources need a reward function, and have one."""


POLICY, JUDGE = "actor_rollout_ref.model.path", "reward_model.model.path"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
SILENT_S = 5.0  # of an import, after which the check says what it waits for
TRIAL_LIMIT_S, JUDGE_LIMIT_S = 5.0, 30.0
"""For the call of a reward function, which may be slower in training but must not delay `rlx check`; and of a judge with its retries."""


def check_data(config: PPOConfig, broken: frozenset[str]) -> tuple[Fault, ...]:
    """Return a fault for each file whose first row cannot be used, one if no batch can be filled, one for sources without a reward.

    Files that are missing or of an unknown kind are reported by a rule of the configuration and skipped here, and URLs are not fetched. Keys that could not be
    read, `broken`, are not judged. Nor is a dataset class of the user's own.
    """
    return () if config.data.custom_cls.path is not None else tuple(_data_faults(config, broken))


def training_rows(config: PPOConfig, most: int | None = None) -> int | None:
    """Return the number of training rows, JSON lines counted to `most`; None if a file cannot be read or a class makes them."""
    data, rows = config.data, 0
    if data.custom_cls.path is not None:
        return None
    try:
        for file in data.train_files:
            if file == ARITHMETIC:
                rows += data.arithmetic.train_size
                continue
            if is_url(file):
                return None
            for part in parts_of(file):
                rows += part.count(most) if most is None or rows < most else 0
    except DataError:
        return None
    return rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)


def _data_faults(config: PPOConfig, broken: frozenset[str]) -> Iterator[Fault]:
    places: dict[str, list[str]] = {}  # key=file by the data source of the file's first row
    for split, key in SPLITS.items() if roles.validates(config) else [("train", SPLITS["train"])]:
        files, most = config.data.train_files, config.data.train_max_samples
        if split == "val":
            files, most = config.data.val_files, config.data.val_max_samples
        for number, file in enumerate(files):
            if broken.isdisjoint((key, *COLUMN_KEYS)) and _is_rows(file):
                try:
                    prompt = _prompt_of_first_row(file, config, split, most)
                    if most < 0 or number == 0:  # else the samples may end before this file
                        places.setdefault(prompt.data_source, []).append(f"{key}={file}")
                except DataError as error:
                    yield _row_fault(f"{key}: the rows of {file} cannot be used", error, key)
    if broken.isdisjoint(SCORING_KEYS):
        yield from _without_function(config, places)
    batch = roles.prompts_at_once(config)
    rows = training_rows(config, batch)
    if rows and broken.isdisjoint(("data.train_files", "data.train_batch_size", "data.gen_batch_size")):
        try:
            require_prompts(batch, rows)
        except DataError as error:
            yield _row_fault("data.train_batch_size is larger than the data", error, "data.train_batch_size")


def _prompt_of_first_row(file: str, config: PPOConfig, split: str, most: int) -> Prompt:
    """Return the prompt of the first row. Raises DataError; if the row is faulty, it names the faults of the other rows too."""
    with suppress(DataError, RowFault):
        rows = parts_of(file)[0].open(1)
        return to_prompt(form_of(file, rows.columns, config.data, split), rows.read(0, 1)[0], 0)
    faults = RowFaults()
    for part in parts_of(file):
        rows = part.open()
        read = range(len(rows) if most < 0 else min(most, len(rows)))
        prompts_of(part.name, rows, form_of(part.name, rows.columns, config.data, split), read, faults)
        most = max(most - len(read), 0) if most >= 0 else most
    faults.end()
    raise AssertionError("the first row is faulty")


def _without_function(config: PPOConfig, places: dict[str, list[str]]) -> Iterator[Fault]:
    """Yield a fault if the run asks reward functions and none scores the data sources of some first rows."""
    custom = config.custom_reward_function
    scored = scored_sources(custom)
    if scored is None or roles.only_environment_scores(config) or roles.model_scores_alone(config):
        return
    if unknown := sorted(places.keys() - scored):
        nothing = f"no {config.data.reward_fn_key}"
        found = {source: nothing if source == PLAIN_SOURCE else repr(source) for source in unknown}
        got = "; ".join(f"{what} in the first row of {', '.join(places[source])}" for source, what in found.items())
        what, expected, remedy = no_function_for(unknown), ", ".join(sorted(scored)), remedy_for(unknown, custom)
        if roles.has_environment(config):
            remedy += "; if the environment gives the rewards, set environment.rewards=replace"
        yield Fault(what, got, expected, remedy, ("custom_reward_function.path", "data.reward_fn_key"))


def _is_rows(file: str) -> bool:
    parts = [] if is_url(file) else data_parts(file)  # a URL is fetched when the run starts
    return bool(parts) and {*map(data_kind, parts)} <= {*DATA_KINDS, SAVED}


def _row_fault(what: str, error: DataError, key: str) -> Fault:
    if isinstance(error, FormError):
        return Fault(what, error.got, error.expected, error.remedy, (key,))
    return Fault(what, str(error), "rows in one of the forms of docs/data.md", f"correct the file or {key}", (key,))


def check_models(config: PPOConfig, broken: frozenset[str], machine: Machine) -> tuple[Fault, ...]:
    """Return the faults of each model folder of this machine; reads no weights.

    Folders that are missing or without a config.json are reported by a rule of the configuration and skipped here, as is what the
    rule of the reward model judges. Keys that could not be read, `broken`, are not judged. A folder without weights serves to plan,
    and for a machine that is only named every folder does.
    """
    paths = {role.model.path or "": f"{role.model_key}.path" for role in reversed(roles.sharded_roles(config))}
    faults: list[Fault] = []
    for path, key in paths.items():
        folder = Path(path).expanduser()
        if not path or key in broken or not (folder / "config.json").is_file():
            continue
        for file in (folder / name for name in MODEL_JSON_FILES if key != JUDGE and (folder / name).exists()):
            try:
                read_json(file)
            except (CheckpointError, OSError) as error:
                faults.append(_file_fault("a file of the model cannot be read", str(error), "a JSON object", key))
        if machine.name is None:
            here = {name for name in (*WEIGHTS, *TOKENIZER_FILES) if (folder / name).exists()}
            if key == POLICY and not here.isdisjoint(WEIGHTS) and here.isdisjoint(TOKENIZER_FILES):
                remedy = "save the tokenizer that the model was trained with in its folder (save_pretrained)"
                got, expected = f"{POLICY}={folder}", f"one of {', '.join(TOKENIZER_FILES)}"
                faults.append(Fault("the model's folder has no tokenizer", got, expected, remedy, (POLICY,)))
            faults += _of_weights(folder, key)
    return tuple(faults)


def local_roles(config: PPOConfig) -> list[roles.ModelRole]:
    """Return the roles whose model is a folder of this machine."""
    return [
        role for role in roles.sharded_roles(config) if role.model.path and Path(role.model.path).expanduser().is_dir()
    ]


def tries_start(config: PPOConfig, is_here: bool) -> bool:
    """Whether this machine has what `faults_at_start` looks at: a folder of a model, or for a run on it files of rows."""
    files = {*config.data.train_files, *config.data.val_files}
    return bool(local_roles(config)) or (is_here and files != {ARITHMETIC} and not any(map(is_url, files)))


def _of_weights(folder: Path, key: str) -> Iterator[Fault]:
    from safetensors import SafetensorError, safe_open

    faults = []
    try:
        for file in _weights_in(folder):
            try:
                with safe_open(file, "np"):  # it compares the header with the file's length
                    pass
            except (OSError, SafetensorError) as error:
                size = f", {file.stat().st_size:,} bytes" if file.is_file() else ""
                faults.append(f"{file}{size}: {error}")
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        faults.append(f"{folder / INDEX}: {type(error).__name__}: {error}")
    if faults:
        yield _file_fault("the model's weights cannot be read", few(faults), "whole files in safetensors' format", key)


def _weights_in(folder: Path) -> list[Path]:
    """Return the files that transformers reads, none if they are of another kind; raises an error for a broken index."""
    if (folder / WHOLE).is_file() or not (folder / INDEX).is_file():
        return [folder / WHOLE] if (folder / WHOLE).is_file() else []
    return sorted({folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})


def _file_fault(what: str, got: str, expected: str, key: str) -> Fault:
    return Fault(what, got, expected, f"restore the file, from the hub or a copy, or correct {key}", (key,))


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


def isolation_of_programs(config: PPOConfig) -> str | None:
    """Return a line about the sandbox of the tool `python`; None without the tool, or where `check_user_code` rejects it."""
    own = config.environment
    if own.path is not None or own.name != "python":
        return None
    from rlx.environments.built_in_tools import program_limits
    from rlx.environments.sandbox import isolation_fault, isolation_text

    if isolation_fault():
        return None
    with suppress(UserCodeError):
        return f"python tool: {isolation_text(program_limits(own.kwargs))}"
    return None


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
    files, prompt = config.data.train_files, None
    if config.data.custom_cls.path is None and files and _is_rows(files[0]):
        with suppress(DataError):  # `check_data` reports it
            prompt = _prompt_of_first_row(files[0], config, "train", 1)
    for label, _, reward in own_parts(config.reward, config.custom_reward_function):
        if reward is None or not (reward.is_judge or is_python_file(reward.source)):
            continue
        most_s = JUDGE_LIMIT_S if reward.is_judge else TRIAL_LIMIT_S
        reward = replace(reward, limit_s=min(reward.limit_s, most_s))
        keys = (f"{KEY}.path", f"{KEY}.name", f"{KEY}.reward_kwargs", "reward.reward_manager.name")
        keys = (f"{KEY}.parts", *keys[3:]) if label else keys
        what = f"the part {label} of the reward" if label else "the reward function of your own"
        called = f"{reward.name}({', '.join((*reward.parameters, *reward.options))}), called by keyword"
        expected = "a judge that answers" if reward.is_judge else called
        memory_limit_gb, trial = config.reward.memory_limit_gb, _trial(config, reward, prompt)
        yield UserCode(what, keys, reward, expected, memory_limit_gb, trial=trial)
    own = config.environment
    if roles.has_environment(config) and (own.path is None or is_python_file(own.path)):
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
    if prompt is None or roles.has_environment(config) or roles.model_scores_alone(config):
        return None
    if sources and prompt.data_source not in sources:
        return None
    values = (prompt.data_source, str(prompt.ground_truth), prompt.ground_truth, prompt.extra_info)
    if function.batched:
        return RewardCall(function, dict(zip(BATCHED, ([value] for value in values), strict=True)))
    return RewardCall(function, dict(zip(function.parameters, (*values, prompt.content), strict=False)))


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return a training row as an environment gets it."""
    content = prompt.content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    given = {name: getattr(prompt, name) for name in ("data_source", "ground_truth", "extra_info")}
    return {"prompt": messages, **given, "seed": 0}


def _tried(own: UserCode) -> tuple[str, str] | None:
    """Import the code and try it; return the kind of a failure and what happened. Raises UserCodeError."""
    what = f"the import {'or the first reset ' * (own.row is not None)}of {own.what}"
    with _told_after(SILENT_S, f"{program('check')}: {what} is not done yet"):
        if own.row is not None and isinstance(own.code, EnvironmentSpec):
            with EnvironmentPool(own.code, 1, own.memory_limit_gb) as environments:  # with its own limit, as in a run
                environments.reset(0, own.row)
                while not (answers := environments.poll(1.0)):
                    pass
            _, answer = answers[0]
            return (answer.kind, answer.reason) if isinstance(answer, Failure) else None
        with ScoringPool(1, own.memory_limit_gb, at_once=1) as pool:
            pool.check(own.code)
            return None if own.trial is None else _failure(pool, own.trial)


def _stops(config: PPOConfig, own: UserCode, kind: str) -> bool:
    """Whether such a failure in a run would stop it."""
    if own.row is not None:
        return config.environment.on_failure == "end_run"
    return (config.reward.on_error if kind == "error" else config.reward.on_crash) == "stop"


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
