"""Read rows from files, folders and URLs and turn them into prompts, with errors that name the file and the row.

This module imports neither torch nor transformers nor pyarrow, because a check takes a second in all. `rlx check` reads first rows with
it, a run all of them.
"""

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlparse

from rlx.config.schema import ARITHMETIC, PLAIN_SOURCE, DataConfig
from rlx.errors import ExplainedError
from rlx.heartbeat import beat
from rlx.row_files import COMPRESSED, DATA_KINDS, SAVED, data_kind, data_parts

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


class DataError(ExplainedError, ValueError):
    """A prompt file or one of its rows is not as expected."""


class FormError(DataError):
    """A DataError by its parts; `str` makes one sentence of them."""

    def __init__(self, what: str, got: str, expected: str, remedy: str):
        super().__init__(what, got, expected, remedy)
        self.what, self.got, self.expected, self.remedy = what, got, expected, remedy

    def __str__(self) -> str:
        return f"{self.what}: got {self.got}, expected {self.expected}; {self.remedy}"


class RowFault(ValueError):
    """Why a row cannot be used: what it has and what is expected, and the remedy; without the row's place."""

    def __init__(self, what: str, remedy: str = "correct the row or remove it"):
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


Row: TypeAlias = dict[str, Any] | RowFault
"""A row, or why it cannot be read."""
MOST_SHOWN = 10
MOST_HANGS = 3
Item = TypeVar("Item")
Result = TypeVar("Result")


class RowFaults:
    """Collects the faults of rows, so that a user learns of all at once."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[int, str, str]]] = {}
        self._remedies: dict[str, None] = {}

    def add(self, file: str, rows: "Rows", index: int, fault: RowFault) -> None:
        """Note why the row at `index` of a file cannot be used."""
        self._found.setdefault(file, []).append((index, f"{rows.place(index)}: {fault.what}", fault.remedy))
        self._remedies[fault.remedy] = None

    def end(self) -> None:
        """Raise a DataError with the number of faults and the first MOST_SHOWN, if there are any."""
        count = sum(map(len, self._found.values()))
        if count == 1:
            ((file, ((_, fault, remedy),)),) = self._found.items()
            raise DataError(f"{file}, {fault}; {remedy}")
        if count:
            raise DataError("\n".join(self._lines(count)))

    def _lines(self, count: int) -> list[str]:
        """Return a line for each row shown, and the remedies: one at the end, of several each behind its rows."""
        lines, room, unsaid = [], MOST_SHOWN, dict(self._remedies)
        for file, faults in self._found.items():
            first = sorted(faults)[:room]
            room -= len(first)
            shown = [fault for _, fault, _ in first]
            if len(self._remedies) > 1:
                shown = [f"{fault}; {remedy}" for _, fault, remedy in first]
                for _, _, remedy in first:
                    unsaid.pop(remedy, None)
            lines.append(f"{file}: rows that cannot be used: {len(faults):,}; lines and rows are counted from 1")
            lines += [f"    {fault}" for fault in shown]
        lines += [f"    and {count - MOST_SHOWN:,} more"] * (count > MOST_SHOWN)
        of_others = " of other rows" if len(self._remedies) > 1 else ""
        return lines + [f"    remedy{of_others}: {remedy}" for remedy in unsaid]


class Rows:
    """Rows in memory; `columns` are those of the file (JSONL: of its first row), `lines` the rows' numbers in a file of lines."""

    def __init__(self, rows: Sequence[Row], lines: Sequence[int] | None = None):
        self._rows, self._lines = rows, lines
        self.columns = next((list(row) for row in rows if not isinstance(row, RowFault)), [])

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[Row]:
        return list(self._rows[start:stop])

    def place(self, index: int) -> str:
        """Return where a user finds a row, counted from 1: `line 3` of JSONL, `row 3` of others."""
        return f"row {index + 1}" if self._lines is None else f"line {self._lines[index]}"


class ArrowRows(Rows):
    """An Arrow table; rows become Python objects when they are read."""

    def __init__(self, table: "pa.Table"):
        super().__init__(())
        self._table, self.columns = table, list(table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows start..stop-1; faulty are those with a text that is none, or a time that Python cannot hold."""
        try:
            return list(self._table.slice(start, stop - start).to_pylist())
        except (ValueError, OverflowError) as fault:
            if stop - start == 1:
                return [RowFault(f"cannot be read ({type(fault).__name__}: {_first_line(fault)})")]
            return [row for number in range(start, stop) for row in self.read(number, number + 1)]


class Part(NamedTuple):
    """A file of rows: its name in messages, its path on this machine, and its kind as `data_kind` tells."""

    name: str
    path: Path
    kind: str

    def open(self, most: int | None = None) -> Rows:
        """Read it, or the first of its rows, at least one and at most `most`. Raises DataError if it cannot be read, or has no usable row."""
        with _explained(self):
            if self.kind in (".parquet", SAVED):
                rows: Rows = ArrowRows(self._table(most))
                self._require_different(rows.columns)
            else:
                found = list(islice(self._lines(), most))
                rows = Rows([row for _, row in found], [line for line, _ in found if line is not None] or None)
        if not len(rows):
            raise DataError(f"{self.name}: the file has no rows, expected at least one")
        if not rows.columns:
            faults = RowFaults()
            for index, row in enumerate(rows.read(0, len(rows))):
                if isinstance(row, RowFault):
                    faults.add(self.name, rows, index, row)
            faults.end()
        return rows

    def _require_different(self, names: Sequence[str]) -> None:
        if len({*names}) < len(names):
            raise DataError(f"{self.name}: got the columns {[*names]}, expected different names; rename one")

    def count(self, most: int | None = None) -> int:
        """Return the number of rows, those of text counted to `most`. Raises DataError as `open`."""
        if self.kind != ".parquet":
            return len(self.open(most))
        import pyarrow.parquet as pq  # a check of other files does without it

        with _explained(self):
            return int(pq.read_metadata(self.path).num_rows)

    def _table(self, most: int | None) -> "pa.Table":
        if self.kind == SAVED:
            from datasets import load_from_disk

            return load_from_disk(self.path).with_format("arrow")[:most]
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, memory_map=True) as opened:
            if most is None:
                return opened.read()
            return pa.Table.from_batches(islice(opened.iter_batches(most), 1), opened.schema_arrow)

    def _lines(self) -> Iterator[tuple[int | None, Row]]:
        """Yield the rows of a file of text with their lines, counted from 1; None in a table and in a list of JSON."""
        with self._stream() as stream:
            if self.kind in TABLES:
                yield from ((None, row) for row in self._of_table(io.TextIOWrapper(stream, "utf-8-sig", newline="")))
                return
            if self.kind == ".json" and (whole := stream.read()).lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"["):
                yield from ((None, _as_row(each)) for each in json.loads(whole.decode("utf-8-sig")))
                return
            for number, line in enumerate(whole.splitlines() if self.kind == ".json" else stream, 1):
                if line.strip():
                    yield number, _parse_line(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)

    def _of_table(self, text: io.TextIOWrapper) -> Iterator[Row]:
        csv.field_size_limit(2**31 - 1)
        # Strict, because a quote without an end would make one cell of all that follows.
        rows, count = csv.DictReader(text, delimiter=TABLES[self.kind], strict=True), 0
        try:
            named = [name for name in rows.fieldnames or () if name]
            self._require_different(named)
            if len(named) == 1 and (other := re.search(r"[,;|\t]", named[0])):
                got = f"got columns with {other[0]!r} between them, expected {TABLES[self.kind]!r}"
                raise DataError(f"{self.name}: {got}; write the file with that delimiter")
            for row in rows:
                count += 1
                yield RowFault("the row has more cells than the header") if None in row else row
        except csv.Error as fault:
            remedy = "put quotes around a cell that holds any, and double those in it"
            raise DataError(f"{self.name}: row {count + 1} cannot be read ({fault}); {remedy}") from None

    def _stream(self) -> Any:
        if self.path.suffix not in COMPRESSED:
            return self.path.open("rb")
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(self.path), compression="detect"))


TABLES = {".csv": ",", ".tsv": "\t"}
"""Delimiters by kind. All cells are text."""


def parts_of(file: str) -> list[Part]:
    """Return the files of a file, folder, pattern or URL. Files of a URL are fetched through fsspec for as long as the process lives.

    Raises DataError if nothing is there, it is of another kind, or it cannot be fetched.
    """
    local = _fetched(file) if "://" in file else data_parts(file)
    if not local:
        looked = file if "://" in file else Path(file).expanduser().absolute()
        what = "no files of rows in this folder" if Path(looked).is_dir() else f"no such file (looked for {looked})"
        raise DataError(f"{file}: {what}; correct its name, such as in data.train_files")
    several = f"{file}, file " if "://" in file else ""
    names = [file] if len(local) == 1 else [f"{several}{Path(path).name if several else path}" for path in local]
    parts = [Part(name, Path(path), data_kind(path)) for name, path in zip(names, local, strict=True)]
    if wrong := [part for part in parts if part.kind not in (*DATA_KINDS, SAVED)]:
        expected = f"{', '.join(DATA_KINDS)} or `{ARITHMETIC}`"
        raise DataError(f"{wrong[0].name}: got a file of kind {wrong[0].kind!r}, expected {expected}")
    return parts


_downloads = cache(partial(TemporaryDirectory, prefix="rlx-data-"))  # removed when the process ends


@cache
def _fetched(url: str) -> list[str]:
    """Return local copies of the files of a URL, which may hold a pattern with `*`."""
    import fsspec

    try:
        files, path = fsspec.url_to_fs(url)
        found = []
        for number, remote in enumerate(sorted(files.glob(path)) if "*" in path else [path]):
            local = Path(mkdtemp(prefix=f"{number}-", dir=_downloads().name)) / Path(urlparse(remote).path).name
            files.get_file(remote, str(local))
            found.append(str(local))
        return found
    except Exception as fault:  # each file system has errors of its own
        why = f"{type(fault).__name__}: {_first_line(fault)}"
        raise DataError(f"{url}: cannot be fetched ({why}); correct the URL, or download the file") from None


def _parse_line(line: bytes) -> Row:
    try:
        return _as_row(json.loads(line.decode()))
    except UnicodeDecodeError as fault:
        return RowFault(f"cannot be read as UTF-8 text ({fault.reason})", "save the file as UTF-8")
    except (ValueError, RecursionError) as fault:
        got = repr(line.decode().strip()[:80])[:80]
        return RowFault(f"got {got}, expected one JSON object per line ({_first_line(fault)})")


def _as_row(value: Any) -> Row:
    return value if isinstance(value, dict) else RowFault(f"got a JSON {type(value).__name__}, expected an object")


@contextmanager
def _explained(part: Part) -> Iterator[None]:
    """Turn the errors of the libraries that read a file into a DataError."""
    kind = {".parquet": " as Parquet", SAVED: " as a data set saved by save_to_disk"}.get(part.kind, "")
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RecursionError, LookupError, NotImplementedError) as fault:
        why = fault.strerror if isinstance(fault, OSError) and fault.strerror and not kind else _first_line(fault)
        remedy = "; save the file as UTF-8" if isinstance(fault, UnicodeDecodeError) else ""
        raise DataError(f"{part.name}: cannot be read{kind} ({why}){remedy}") from None


def _first_line(fault: Exception) -> str:
    return str(fault).partition("\n")[0][:200]


COMPLETION = "completion"
ANSWERS = (
    *("answer", "solution", "ground_truth", "target", "label", "final_answer", "expected_answer", "output", "response"),
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
    """Return what converts a file's rows; with `chats` a plain text becomes a user message. Raises FormError if columns are missing."""
    prompt, source, answer = config.prompt_key, config.reward_fn_key, config.answer_key
    if answer is None and {prompt, COMPLETION} <= set(columns) and "reward_model" not in columns:
        answer = COMPLETION
    if answer is not None:
        _require(name, columns, {"data.prompt_key": prompt, "data.answer_key": answer})
        return lambda row, _: _from_columns(row, prompt, answer, source, chats)
    if prompt not in columns and set(GSM8K_COLUMNS) <= set(columns):
        return lambda row, number: from_verl(gsm8k_row(row, split, number))
    if missing := [column for column in (prompt, source, "reward_model") if column not in columns]:
        raise FormError(name, f"the columns {list(columns)}", f"also {missing}", _remedy_of_verl(columns, prompt))
    return lambda row, _: from_verl(row, prompt, source)


def require_prompts(batch_size: int, prompts: int) -> None:
    """Raise FormError if there are fewer prompts than one batch takes."""
    if not 1 <= batch_size <= prompts:
        remedy = "lower it (or data.gen_batch_size if that is set), or add prompts"
        raise FormError("data.train_batch_size", f"{batch_size} with {prompts} prompts", f"1 to {prompts}", remedy)


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
        likely = _likely_keys(columns, missing)
        remedy = f"{f'set {likely}, or ' if likely else ''}name the columns there are with {' and '.join(needed)}"
        if "reward_model" in columns and [*missing] == ["data.answer_key"]:
            remedy = "remove data.answer_key: the answers of these rows are in reward_model"
        raise FormError(name, f"the columns {list(columns)}", f"also {list(missing.values())}", remedy)


def _remedy_of_verl(columns: Sequence[str], prompt: str) -> str:
    """Return the remedy for rows in no form: plain columns if one looks like an answer, else verl's."""
    of_verl = "name the columns with data.prompt_key and data.reward_fn_key; reward_model holds {style, ground_truth}"
    answer = _likeliest(columns, "answer", ANSWERS)
    if answer is None or "reward_model" in columns:
        return f"{of_verl}; for a column with the plain answer set data.answer_key"
    wanted = {} if prompt in columns else {"data.prompt_key": prompt}
    likely = _likely_keys(columns, wanted | {"data.answer_key": answer})
    return f"the rows have a column {answer!r}: set {likely}. For rows of verl's form {of_verl}"


def _likely_keys(columns: Sequence[str], wanted: dict[str, str]) -> str:
    """Return assignments of the columns that were probably meant by these."""
    usual = {"data.prompt_key": PROMPTS, "data.answer_key": ANSWERS}
    near = {key: _likeliest(columns, column, usual[key]) for key, column in wanted.items()}
    return " ".join(f"{key}={column}" for key, column in near.items() if column is not None)


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
    answer = row.get(answer_key)
    if answer is None:
        raise RowFault(f"{answer_key} is missing, expected the right answer")
    if _is_chat(answer) and len(answer) == 1:  # a completion as TRL has it
        answer = answer[0]["content"]
    source = _checked_source(row.get(source_key) or PLAIN_SOURCE, source_key)
    own = (prompt_key, answer_key, source_key)
    others = {name: value for name, value in row.items() if name not in (*own, TOOLS)}
    content = _checked_content(row.get(prompt_key), prompt_key)
    if isinstance(content, str) and chats:
        content = [{"role": "user", "content": content}]
    return Prompt(content, source, _checked_answer(answer, answer_key), others, _tools_of(row, content, own))


def _checked_source(source: Any, key: str) -> str:
    if not isinstance(source, str):
        raise RowFault(f"{key} is {source!r:.80}, expected the name of a data source")
    return str(_with_whole_characters(source, key))


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
    return tuple(_without_none(tool) for tool in _with_whole_characters(given, TOOLS))


def _is_given(value: Any) -> bool:
    return value is not None and value != "" and not (isinstance(value, list | tuple | dict) and not value)


def _without_none(value: Any) -> Any:
    """Return the value without the fields that Arrow adds to a struct because another row has them."""
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _with_whole_characters(value: Any, key: str) -> Any:
    """Return the value. Raises RowFault if a text in it holds half a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as fault:
        raise RowFault(
            f"{key} holds half a surrogate pair, {fault.object[fault.start]!r}, such as half an emoji, expected whole characters"
        ) from None
    return value


def _is_chat(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in content
    )


def _checked_content(content: Any, key: str) -> Content:
    if content == "":  # for which a tokenizer may have a token all the same, the beginning of a text
        raise RowFault("the prompt is empty, expected at least one token")
    if isinstance(content, str) and re.match(r'\s*\[\s*\{\s*"(role|content)"\s*:', content):
        got = f"{key} is a text with JSON, {content!r:.80}, expected the list of messages itself"
        raise RowFault(got, "convert it, for example with json.loads, and save the rows as JSONL or Parquet")
    if isinstance(content, str):
        return str(_with_whole_characters(content, key))
    if not content or not _is_chat(content):
        expected = "text or a list of messages {role: text, content: text}"
        raise RowFault(f"{key} is {content!r:.120}, expected {expected}")
    messages = _with_whole_characters(content, key)
    # Arrow sets fields that only other rows' messages have to None, and templates would use them.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def text_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts behind the tokens that the tokenizer adds before, unless the text has them, and without those behind.

    After an EOS that the tokenizer adds a model would generate nothing. One that is part of the text stays.
    """
    whole, bare = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
    before = next((whole[:at] for at in range(len(whole)) if bare and whole[at : at + len(bare)] == bare), [])
    found = tokenizer([*texts], add_special_tokens=False)["input_ids"] if texts else []
    return [ids if ids[: len(before)] == before else [*before, *ids] for ids in found]


def together_or_alone(call: Callable[[list[Item]], list[Result]], items: Sequence[Item]) -> list[Result | Exception]:
    """Return the results of one call for all items; if it raises, those of a call for each, or its error.

    The list is shorter if MOST_HANGS of these calls took too long: the other items are not tried.
    """
    try:
        return [*call([*items])] if items else []
    except Exception as fault:  # templates and tokenizers raise any kind of error
        if len(items) == 1:
            return [fault]
    found: list[Result | Exception] = []
    hangs = 0
    for item in items:
        beat()
        try:
            found += call([item])
        except Exception as fault:
            found.append(fault)
            hangs += isinstance(fault, TimeoutError)
        if hangs == MOST_HANGS:
            break
    return found


GSM8K_SOURCE = "openai/gsm8k"
GSM8K_COLUMNS = ("question", "answer")
INSTRUCTION = "Work through this step by step. Then give the final answer alone on the last line, as `#### <number>`."


def gsm8k_row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return an official row ({question, answer}) in verl's schema, with a chat prompt.

    The answer is the worked solution, whose last line is `#### <number>`. extra_info keeps split and index. Raises RowFault
    if question or answer is no text, or the answer has no `####`.
    """
    question, answer = (row.get(name) for name in GSM8K_COLUMNS)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise RowFault(f"got question {question!r:.80} and answer {answer!r:.80}, expected two texts")
    working, mark, final = answer.rpartition("####")
    ground_truth = final.strip().replace(",", "")
    if not mark or not ground_truth:
        end = working[-40:] + mark + final
        raise RowFault(f"got an answer that ends in {end!r:.80}, expected `#### <number>` at its end")
    return {
        "data_source": GSM8K_SOURCE,
        "prompt": [{"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split, "question": question, "answer": answer},
    }
