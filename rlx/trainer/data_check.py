"""Look at the data files before anything starts: the first row of each, and the number of rows.

The rows after the first, and the lengths of prompts, are read by `rlx.trainer.start.prepare`, which needs the tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path

from rlx.config.faults import Fault
from rlx.config.schema import ARITHMETIC, PPOConfig
from rlx.config.schema.roles import prompts_at_once
from rlx.data.files import DataError, FormError, peek
from rlx.data.forms import form_of, require_prompts, to_prompt

SPLITS = {"train": "data.train_files", "val": "data.val_files"}
COLUMN_KEYS = ("data.prompt_key", "data.answer_key", "data.reward_fn_key")


def check_data(config: PPOConfig, broken: frozenset[str]) -> tuple[Fault, ...]:
    """Return a fault for each file whose first row cannot be used, and one if the training rows do not fill a batch.

    A rule of the configuration reports missing files; here they are no fault. Keys that could not be read, `broken`, are not
    judged. Nor is a dataset class of the user's own.
    """
    return () if config.data.custom_cls.path is not None else tuple(_faults(config, broken))


def training_rows(config: PPOConfig, most: int | None = None) -> int | None:
    """Return the number of training rows, JSON lines counted to `most`; None if a file cannot be read or a class makes them."""
    data, rows = config.data, 0
    if data.custom_cls.path is not None:
        return None
    try:
        for file in data.train_files:
            rows += data.arithmetic.train_size if file == ARITHMETIC else peek(file, most).rows
    except DataError:
        return None
    return rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)


def _faults(config: PPOConfig, broken: frozenset[str]) -> Iterator[Fault]:
    for split, key in SPLITS.items():
        for file in config.data.train_files if split == "train" else config.data.val_files:
            if broken.isdisjoint((key, *COLUMN_KEYS)) and Path(file).expanduser().is_file():
                try:
                    columns, first, _ = peek(file, most=1)
                    to_prompt(file, form_of(file, columns, config.data, split), first, 0)
                except DataError as error:
                    yield _fault(f"{key}: the rows of {file} cannot be used", error, key)
    batch = prompts_at_once(config)
    rows = training_rows(config, batch)
    if rows and broken.isdisjoint(("data.train_files", "data.train_batch_size", "data.gen_batch_size")):
        try:
            require_prompts(batch, rows)
        except DataError as error:
            yield _fault("data.train_batch_size is larger than the data", error, "data.train_batch_size")


def _fault(what: str, error: DataError, key: str) -> Fault:
    if isinstance(error, FormError):
        return Fault(what, error.got, error.expected, error.remedy, (key,))
    return Fault(what, str(error), "rows in one of the forms of docs/data.md", f"correct the file or {key}", (key,))
