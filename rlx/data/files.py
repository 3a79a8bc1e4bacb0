"""Read rows from files, folders and URLs, with errors that name the file and the row."""

import codecs
import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import urlparse

from rlx.config.schema import ARITHMETIC
from rlx.errors import ExplainedError
from rlx.row_files import COMPRESSED, DATA_KINDS, SAVED, data_kind, data_parts

if TYPE_CHECKING:
    import pyarrow as pa


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


class Rows(Protocol):
    """Rows by index; `columns` are those of the file (JSONL: of its first row)."""

    columns: list[str]

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows start..stop-1."""
        ...

    def place(self, index: int) -> str:
        """Return where a user finds a row, counted from 1: `line 3` of JSONL, `row 3` of others."""
        ...


class ArrowRows:
    """An Arrow table; rows become Python objects when they are read."""

    def __init__(self, table: "pa.Table"):
        self._table = table
        self.columns = list(table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows start..stop-1; faulty are those with a text that is none, or a time that Python cannot hold."""
        try:
            return list(self._table.slice(start, stop - start).to_pylist())
        except (ValueError, OverflowError) as fault:
            if stop - start == 1:
                return [_unreadable(fault)]
            return [row for number in range(start, stop) for row in self.read(number, number + 1)]

    def place(self, index: int) -> str:
        """Return the row's number, counted from 1."""
        return f"row {index + 1}"


class ListRows:
    """Rows in memory; `lines` are their numbers in a file of lines."""

    def __init__(self, rows: Sequence[Row], lines: Sequence[int] | None = None):
        self._rows, self._lines = rows, lines
        self.columns = next((list(row) for row in rows if not isinstance(row, RowFault)), [])

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows start..stop-1."""
        return list(self._rows[start:stop])

    def place(self, index: int) -> str:
        """Return the row's line, or its number, counted from 1."""
        return f"row {index + 1}" if self._lines is None else f"line {self._lines[index]}"


NO_ROWS = "the file has no rows, expected at least one"


class Part(NamedTuple):
    """A file of rows: its name in messages, its path on this machine, and its kind as `data_kind` tells."""

    name: str
    path: Path
    kind: str

    def open(self) -> Rows:
        """Read it. Raises DataError if it cannot be read, or has no usable row."""
        with _explained(self):
            if self.kind in (".parquet", SAVED):
                rows: Rows = ArrowRows(self._table())
            else:
                found = list(self._lines())
                rows = ListRows([row for _, row in found], None if self.kind in TABLES else [at for at, _ in found])
        if not len(rows):
            raise DataError(f"{self.name}: {NO_ROWS}")
        if not rows.columns:
            faults = RowFaults()
            for index, row in enumerate(rows.read(0, len(rows))):
                if isinstance(row, RowFault):
                    faults.add(self.name, rows, index, row)
            faults.end()
        return rows

    def peek(self, most: int | None) -> "Peek":
        """See the function `peek`."""
        with _explained(self):
            if self.kind == ".parquet":
                return _peek_parquet(self.path)
            if self.kind == SAVED:
                table = self._table()
                return Peek(list(table.column_names), ArrowRows(table).read(0, 1)[0], table.num_rows)
            lines = self._lines()
            if (first := next(lines, None)) is None:
                raise DataError(f"{self.name}: {NO_ROWS}")
            columns = [] if isinstance(first[1], RowFault) else list(first[1])
            return Peek(columns, first[1], 1 + sum(1 for _ in islice(lines, None if most is None else most - 1)))

    def _table(self) -> "pa.Table":
        if self.kind == ".parquet":
            import pyarrow.parquet as pq  # a check of other files does without it

            return pq.read_table(self.path, memory_map=True)
        from datasets import load_from_disk

        return load_from_disk(self.path).with_format("arrow")[:]

    def _lines(self) -> Iterator[tuple[int, Row]]:
        """Yield the rows of a file of text with their lines (of a table: with their numbers), counted from 1."""
        with self._stream() as stream:
            if self.kind in TABLES:
                csv.field_size_limit(2**31 - 1)
                text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
                for number, row in enumerate(csv.DictReader(text, delimiter=TABLES[self.kind]), 1):
                    yield number, RowFault("the row has more cells than the header") if None in row else row
                return
            if self.kind == ".json" and (whole := stream.read()).lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"["):
                for number, row in enumerate(json.loads(whole.decode("utf-8-sig")), 1):
                    yield number, row if isinstance(row, dict) else _no_object(row)
                return
            for number, line in enumerate(whole.splitlines() if self.kind == ".json" else stream, 1):
                if line.strip():
                    yield number, _parse_line(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)

    def _stream(self) -> Any:
        if self.path.suffix not in COMPRESSED:
            return self.path.open("rb")
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(self.path), compression="detect"))


TABLES = {".csv": ",", ".tsv": "\t"}
"""Delimiters by kind. All cells are text."""


class Peek(NamedTuple):
    """What a look at a file shows, without reading it: its columns, its first row, and how many rows it has."""

    columns: list[str]
    first: Row
    rows: int


def parts_of(file: str) -> list[Part]:
    """Return the files of a file, folder, pattern or URL. Files of a URL are fetched through fsspec for as long as the process lives.

    Raises:
        DataError: nothing is there, it is of another kind, or it cannot be fetched.
    """
    local = _fetched(file) if "://" in file else data_parts(file)
    if not local:
        looked = file if "://" in file else Path(file).expanduser().absolute()
        raise DataError(f"{file}: no such file (looked for {looked}); correct data.train_files or data.val_files")
    several = f"{file}, file " if "://" in file else ""
    names = [file] if len(local) == 1 else [f"{several}{Path(path).name if several else path}" for path in local]
    parts = [Part(name, Path(path), data_kind(path)) for name, path in zip(names, local, strict=True)]
    if wrong := [part for part in parts if part.kind not in (*DATA_KINDS, SAVED)]:
        expected = f"{', '.join(DATA_KINDS)} or `{ARITHMETIC}`"
        raise DataError(f"{wrong[0].name}: got a file of kind {wrong[0].kind!r}, expected {expected}")
    return parts


@cache
def _downloads() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="rlx-data-")  # removed when the process ends


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


def open_rows(file: str) -> Rows:
    """Open the rows of one file. Raises DataError: it is missing, empty, of another kind, or cannot be read."""
    (part,) = parts_of(file)
    return part.open()


def peek(file: str, most: int | None = None) -> Peek:
    """Return what a look at a file shows. Rows of text are counted no further than `most`. Raises DataError as `open_rows`."""
    first, *others = parts_of(file)
    found = first.peek(most)
    rows = found.rows
    for part in others:
        if most is None or rows < most:
            rows += part.peek(None if most is None else most - rows).rows
    return found._replace(rows=rows)


def _peek_parquet(path: Path) -> Peek:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, memory_map=True) as opened:
        batch = next(opened.iter_batches(batch_size=1), None)
        columns, rows = list(opened.schema_arrow.names), opened.metadata.num_rows
    if batch is None:
        raise DataError(f"{path}: {NO_ROWS}")
    try:
        return Peek(columns, batch.to_pylist()[0], rows)
    except (ValueError, OverflowError) as fault:
        return Peek(columns, _unreadable(fault), rows)


def _parse_line(line: bytes) -> Row:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as fault:
        return RowFault(f"cannot be read as UTF-8 text ({fault.reason})", "save the file as UTF-8")
    except (ValueError, RecursionError) as fault:
        got = repr(line.decode().strip()[:80])[:80]
        return RowFault(f"got {got}, expected one JSON object per line ({_first_line(fault)})")
    return row if isinstance(row, dict) else _no_object(row)


def _no_object(value: Any) -> RowFault:
    return RowFault(f"got a JSON {type(value).__name__}, expected an object")


def _unreadable(fault: Exception) -> RowFault:
    return RowFault(f"cannot be read ({type(fault).__name__}: {_first_line(fault)})")


@contextmanager
def _explained(part: Part) -> Iterator[None]:
    """Turn the errors of the libraries that read a file into a DataError."""
    kind = {".parquet": " as Parquet", SAVED: " as a data set saved by save_to_disk"}.get(part.kind, "")
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, csv.Error, RecursionError, LookupError, NotImplementedError) as fault:
        why = fault.strerror if isinstance(fault, OSError) and fault.strerror and not kind else _first_line(fault)
        raise DataError(f"{part.name}: cannot be read{kind} ({why})") from None


def _first_line(fault: Exception) -> str:
    return str(fault).partition("\n")[0][:200]
