"""The forms that rows may have, known by their columns: for the first row in `rlx check`, and for all rows in a run.

This module imports neither torch nor transformers nor pyarrow, because a check takes a second in all.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias

from rlx.config.schema import PLAIN_SOURCE, DataConfig
from rlx.data import gsm8k
from rlx.data.files import FormError, Row, RowFault, RowFaults, Rows

ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "final_answer", "expected_answer", "output")
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
"""Usual names of the two columns, for remedies."""

Content: TypeAlias = str | list[dict[str, Any]]


class Prompt(NamedTuple):
    """A row of any kind of file; `content` is text, or chat messages {role, content}."""

    content: Content
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


ToPrompt: TypeAlias = Callable[[dict[str, Any], int], Prompt]
"""Converts a row with its number; raises RowFault if the row is faulty."""


def form_of(name: str, columns: Sequence[str], config: DataConfig, split: str, chats: bool = True) -> ToPrompt:
    """Return what converts the rows of a file.

    Args:
        name: of the file, for messages.
        columns: of the file.
        config: names the columns of prompt, answer and source.
        split: "train" or "val".
        chats: whether a plain text becomes a user message.

    Raises:
        FormError: columns are missing.
    """
    prompt, source, answer = config.prompt_key, config.reward_fn_key, config.answer_key
    if answer is not None:
        _require(name, columns, {"data.prompt_key": prompt, "data.answer_key": answer})
        return lambda row, _: _from_columns(row, prompt, answer, source, chats)
    if prompt not in columns and set(gsm8k.GSM8K_COLUMNS) <= set(columns):
        return lambda row, number: from_verl(gsm8k.to_row(row, split, number))
    if missing := [column for column in (prompt, source, "reward_model") if column not in columns]:
        raise FormError(name, f"the columns {list(columns)}", f"also {missing}", _remedy_of_verl(columns, prompt))
    return lambda row, _: from_verl(row, prompt, source)


def require_prompts(batch_size: int, prompts: int) -> None:
    """Raise FormError if there are fewer prompts than one batch takes."""
    if not 1 <= batch_size <= prompts:
        raise FormError(
            "data.train_batch_size",
            f"{batch_size} with {prompts} prompts",
            f"1 to {prompts}",
            "lower it (or data.gen_batch_size if that is set), or add prompts",
        )


def to_prompt(convert: ToPrompt, row: Row, index: int) -> Prompt:
    """Return a row's prompt. Raises RowFault if the row is faulty."""
    if isinstance(row, RowFault):
        raise row
    return convert(row, index)


def prompts_of(name: str, rows: Rows, convert: ToPrompt, part: range, faults: RowFaults) -> dict[int, Prompt]:
    """Return the prompts of the usable rows among those in `part`, by index; the others go to `faults`."""
    prompts = {}
    for index, row in zip(part, rows.read(part.start, part.stop), strict=False):
        try:
            prompts[index] = to_prompt(convert, row, index)
        except RowFault as fault:
            faults.add(name, rows, index, fault)
    return prompts


def _require(name: str, columns: Sequence[str], needed: dict[str, str]) -> None:
    """Raise FormError, with the likeliest columns as remedy, if one of the columns that the keys name is missing."""
    missing = {key: column for key, column in needed.items() if column not in columns}
    if missing:
        usual = {"data.prompt_key": PROMPTS, "data.answer_key": ANSWERS}
        near = {key: _likeliest(columns, column, usual[key]) for key, column in missing.items()}
        likely = [f"{key}={column}" for key, column in near.items() if column is not None]
        keys = " and ".join(needed)
        remedy = f"set {' '.join(likely)}, or name" if likely else "name"
        raise FormError(
            name,
            f"the columns {list(columns)}",
            f"also {list(missing.values())}",
            f"{remedy} the columns there are with {keys}",
        )


def _remedy_of_verl(columns: Sequence[str], prompt: str) -> str:
    """Return the remedy for rows in no form: plain columns if one looks like an answer, else verl's."""
    of_verl = "name the columns with data.prompt_key and data.reward_fn_key; reward_model holds {style, ground_truth}"
    answer = _likeliest(columns, "answer", ANSWERS)
    if answer is None or "reward_model" in columns:
        return f"{of_verl}; for a column with the plain answer set data.answer_key"
    keys = [f"data.answer_key={answer}"]
    if prompt not in columns and (near := _likeliest(columns, prompt, PROMPTS)) is not None:
        keys.insert(0, f"data.prompt_key={near}")
    return f"the rows have a column {answer!r}: set {' '.join(keys)}. For rows of verl's form {of_verl}"


def _likeliest(columns: Sequence[str], wanted: str, usual: Sequence[str]) -> str | None:
    """Return the column that was probably meant by `wanted`: a similar name, else a usual one."""
    near = get_close_matches(wanted, columns, n=1)
    return next(iter((*near, *(name for name in usual if name in columns))), None)


def from_verl(row: dict[str, Any], prompt_key: str = "prompt", source_key: str = "data_source") -> Prompt:
    """Convert a row of verl's form. Raises RowFault if it is faulty."""
    content, source, reward_model = row.get(prompt_key), row.get(source_key), row.get("reward_model")
    extra_info = row.get("extra_info") or {}
    if not isinstance(source, str):
        raise RowFault(f"{source_key} is {source!r:.80}, expected the name of a data source")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise RowFault(f"reward_model is {reward_model!r:.80}, expected {{style, ground_truth}}")
    if not isinstance(extra_info, dict):
        raise RowFault(f"extra_info is {extra_info!r:.80}, expected an object or nothing")
    return Prompt(_checked_content(content, prompt_key), source, reward_model["ground_truth"], extra_info)


def _from_columns(row: dict[str, Any], prompt_key: str, answer_key: str, source_key: str, chats: bool) -> Prompt:
    """Convert a row of plain columns. `extra_info` holds its other columns; without a source it is of `PLAIN_SOURCE`."""
    content, answer = row.get(prompt_key), row.get(answer_key)
    if answer is None:
        raise RowFault(f"{answer_key} is missing, expected the right answer")
    source = row.get(source_key) or PLAIN_SOURCE
    if not isinstance(source, str):
        raise RowFault(f"{source_key} is {source!r:.80}, expected the name of a data source")
    others = {name: value for name, value in row.items() if name not in (prompt_key, answer_key, source_key)}
    if isinstance(content, str) and content and chats:
        content = [{"role": "user", "content": content}]
    return Prompt(_checked_content(content, prompt_key), source, answer, others)


def _checked_content(content: Any, key: str) -> Content:
    if content == "":  # for which a tokenizer may have a token all the same, the beginning of a text
        raise RowFault("the prompt is empty, expected at least one token")
    if isinstance(content, str):
        return content
    is_chat = isinstance(content, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in content
    )
    if not content or not is_chat:
        expected = "text or a list of messages {role: text, content: text}"
        raise RowFault(f"{key} is {content!r:.120}, expected {expected}")
    # Arrow sets fields that only other rows' messages have to None, and templates would use them.
    return [{name: value for name, value in message.items() if value is not None} for message in content]
