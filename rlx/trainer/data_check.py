"""Look at the data files before anything starts: the first row of each, and the number of rows.

The rows after the first, and the lengths of prompts, are read by `rlx.trainer.start.prepare`, which needs the tokenizer.
"""

from collections.abc import Iterator
from contextlib import suppress

from rlx.config.check.folders import is_url
from rlx.config.faults import Fault
from rlx.config.schema import ARITHMETIC, PLAIN_SOURCE, PPOConfig
from rlx.config.schema.roles import (
    has_environment,
    model_scores_alone,
    only_environment_scores,
    prompts_at_once,
    validates,
)
from rlx.data.files import (
    DataError,
    FormError,
    Prompt,
    RowFault,
    RowFaults,
    form_of,
    parts_of,
    peek,
    prompts_of,
    require_prompts,
    to_prompt,
)
from rlx.rewards.rules import no_function_for, remedy_for, scored_sources
from rlx.row_files import DATA_KINDS, SAVED, data_kind, data_parts

SPLITS = {"train": "data.train_files", "val": "data.val_files"}
COLUMN_KEYS = ("data.prompt_key", "data.answer_key", "data.reward_fn_key")
SCORING_KEYS = (
    *("custom_reward_function.path", "custom_reward_function.data_sources"),
    *("reward_model.enable", "reward_model.rule_weight"),
    *("environment.name", "environment.path", "environment.rewards"),
)
"""The keys that decide which data sources need a reward function, and have one."""


def check_data(config: PPOConfig, broken: frozenset[str]) -> tuple[Fault, ...]:
    """Return a fault for each file whose first row cannot be used, one if no batch can be filled, one for sources without a reward.

    Files that are missing or of an unknown kind are reported by a rule of the configuration and skipped here, and URLs are not fetched. Keys that could not be
    read, `broken`, are not judged. Nor is a dataset class of the user's own.
    """
    return () if config.data.custom_cls.path is not None else tuple(_faults(config, broken))


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
            _, first, count = peek(file, most)
            if isinstance(first, RowFault):
                return None
            rows += count
    except DataError:
        return None
    return rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)


def first_training_prompt(config: PPOConfig) -> Prompt | None:
    """Return the prompt of the first training row; None if it is not read from a file. Raises DataError."""
    files = config.data.train_files
    if config.data.custom_cls.path is not None or not files or not _is_rows(files[0]):
        return None
    return _first_prompt(files[0], config, "train", 1)


def _faults(config: PPOConfig, broken: frozenset[str]) -> Iterator[Fault]:
    places: dict[str, list[str]] = {}  # key=file by the data source of the file's first row
    for split, key in SPLITS.items() if validates(config) else [("train", SPLITS["train"])]:
        files, most = config.data.train_files, config.data.train_max_samples
        if split == "val":
            files, most = config.data.val_files, config.data.val_max_samples
        for number, file in enumerate(files):
            if broken.isdisjoint((key, *COLUMN_KEYS)) and _is_rows(file):
                try:
                    prompt = _first_prompt(file, config, split, most)
                    if most < 0 or number == 0:  # else the samples may end before this file
                        places.setdefault(prompt.data_source, []).append(f"{key}={file}")
                except DataError as error:
                    yield _fault(f"{key}: the rows of {file} cannot be used", error, key)
    if broken.isdisjoint(SCORING_KEYS):
        yield from _without_function(config, places)
    batch = prompts_at_once(config)
    rows = training_rows(config, batch)
    if rows and broken.isdisjoint(("data.train_files", "data.train_batch_size", "data.gen_batch_size")):
        try:
            require_prompts(batch, rows)
        except DataError as error:
            yield _fault("data.train_batch_size is larger than the data", error, "data.train_batch_size")


def _first_prompt(file: str, config: PPOConfig, split: str, most: int) -> Prompt:
    """Return the prompt of the first row. Raises DataError; if the row is faulty, it names the faults of the other rows too."""
    columns, first, _ = peek(file, most=1)
    if not isinstance(first, RowFault):
        with suppress(RowFault):
            return to_prompt(form_of(file, columns, config.data, split), first, 0)
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
    if scored is None or only_environment_scores(config) or model_scores_alone(config):
        return
    if unknown := sorted(places.keys() - scored):
        nothing = f"no {config.data.reward_fn_key}"
        found = {source: nothing if source == PLAIN_SOURCE else repr(source) for source in unknown}
        got = "; ".join(f"{what} in the first row of {', '.join(places[source])}" for source, what in found.items())
        what, expected, remedy = no_function_for(unknown), ", ".join(sorted(scored)), remedy_for(unknown, custom)
        if has_environment(config):
            remedy += "; if the environment gives the rewards, set environment.rewards=replace"
        yield Fault(what, got, expected, remedy, ("custom_reward_function.path", "data.reward_fn_key"))


def _is_rows(file: str) -> bool:
    parts = [] if is_url(file) else data_parts(file)  # a URL is fetched when the run starts
    return bool(parts) and {*map(data_kind, parts)} <= {*DATA_KINDS, SAVED}


def _fault(what: str, error: DataError, key: str) -> Fault:
    if isinstance(error, FormError):
        return Fault(what, error.got, error.expected, error.remedy, (key,))
    return Fault(what, str(error), "rows in one of the forms of docs/data.md", f"correct the file or {key}", (key,))
