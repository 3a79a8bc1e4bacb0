"""The forms that rows may have, known by their columns: for the first row in `rlx check`, and for all rows in a run.

This module imports neither torch nor transformers nor pyarrow, because a check takes a second in all.
"""

import json
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rlx.config.schema import PLAIN_SOURCE, DataConfig
from rlx.data import gsm8k
from rlx.data.files import FormError, Row, RowFault, RowFaults, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPLETION = "completion"
ANSWERS = (
    "answer",
    "solution",
    "ground_truth",
    "target",
    "label",
    "final_answer",
    "expected_answer",
    "output",
    COMPLETION,
)
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
"""Usual names of the two columns, for remedies."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns with a part of the prompt that is no text."""
TOOLS = "tools"

Content: TypeAlias = str | list[dict[str, Any]]


class Prompt(NamedTuple):
    """A row of any kind of file; `content` is text, or chat messages {role, content}; `tools` are JSON schemas for the template."""

    content: Content
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    tools: tuple[dict[str, Any], ...] = ()


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
    if answer is None and {prompt, COMPLETION} <= set(columns) and "reward_model" not in columns:
        answer = COMPLETION
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
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise RowFault(f"reward_model is {reward_model!r:.80}, expected {{style, ground_truth}}")
    if not isinstance(extra_info, dict):
        raise RowFault(f"extra_info is {extra_info!r:.80}, expected an object or nothing")
    answer = _checked_answer(reward_model["ground_truth"], "ground_truth of reward_model")
    content, tools = _checked_content(content, prompt_key), _tools_of(row, content, (prompt_key, source_key))
    return Prompt(content, _checked_source(source, source_key), answer, extra_info, tools)


def _from_columns(row: dict[str, Any], prompt_key: str, answer_key: str, source_key: str, chats: bool) -> Prompt:
    """Convert a row of plain columns. `extra_info` holds its other columns; without a source it is of `PLAIN_SOURCE`."""
    content, answer = row.get(prompt_key), row.get(answer_key)
    if answer is None:
        raise RowFault(f"{answer_key} is missing, expected the right answer")
    if _is_chat(answer) and len(answer) == 1:  # a completion as TRL has it
        answer = answer[0]["content"]
    source = _checked_source(row.get(source_key) or PLAIN_SOURCE, source_key)
    own = (prompt_key, answer_key, source_key)
    others = {name: value for name, value in row.items() if name not in (*own, TOOLS)}
    if isinstance(content, str) and content and chats:
        content = [{"role": "user", "content": content}]
    checked = _checked_content(content, prompt_key)
    return Prompt(checked, source, _checked_answer(answer, answer_key), others, _tools_of(row, content, own))


def _checked_source(source: Any, key: str) -> str:
    if not isinstance(source, str) or not _is_unicode(source):
        raise RowFault(f"{key} is {source!r:.80}, expected the name of a data source")
    return source


def _checked_answer(answer: Any, key: str) -> Any:
    """Return the answer. JSON's NaN and Infinity are what other programs write for a missing one."""
    if isinstance(answer, float) and not math.isfinite(answer):
        raise RowFault(f"{key} is {answer}, expected the right answer")
    return answer


def _tools_of(row: dict[str, Any], content: Any, own: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Return the tools that the chat template shows, and raise RowFault for parts of the prompt that no text model reads."""
    if media := [name for name in MEDIA if name not in own and _is_given(row.get(name))]:
        raise RowFault(
            f"{media[0]} holds a part of the prompt, expected a prompt of text alone",
            "rlx trains on text: choose rows without images, videos and audio, or rename the column if it is no part of the prompt",
        )
    given = None if TOOLS in own else row.get(TOOLS)
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise RowFault(f"{TOOLS} is {given!r:.80}, expected a JSON list of tools") from None
    if not _is_given(given):
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise RowFault(f"{TOOLS} is {given!r:.80}, expected a list of tools as JSON schemas")
    if isinstance(content, str):
        raise RowFault(
            f"the row has {TOOLS} and a prompt of text, expected messages, for which the chat template shows the tools"
        )
    return tuple(_without_none(tool) for tool in given)


def _is_given(value: Any) -> bool:
    return value is not None and value != "" and not (isinstance(value, list | tuple | dict) and not value)


def _without_none(value: Any) -> Any:
    """Return the value without the fields that Arrow adds to a struct because another row has them."""
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair is in the text."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_chat(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in content
    )


def _checked_content(content: Any, key: str) -> Content:
    if content == "":  # for which a tokenizer may have a token all the same, the beginning of a text
        raise RowFault("the prompt is empty, expected at least one token")
    if isinstance(content, str):
        return content
    if not content or not _is_chat(content):
        expected = "text or a list of messages {role: text, content: text}"
        raise RowFault(f"{key} is {content!r:.120}, expected {expected}")
    # Arrow sets fields that only other rows' messages have to None, and templates would use them.
    return [{name: value for name, value in message.items() if value is not None} for message in content]


def text_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts behind the tokens that the tokenizer adds before, unless the text has them, and without those behind.

    After an EOS that the tokenizer adds a model would generate nothing. One that is part of the text stays.
    """
    whole, bare = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
    before = next((whole[:at] for at in range(len(whole)) if bare and whole[at : at + len(bare)] == bare), [])
    found = tokenizer([*texts], add_special_tokens=False)["input_ids"] if texts else []
    return [ids if ids[: len(before)] == before else [*before, *ids] for ids in found]
