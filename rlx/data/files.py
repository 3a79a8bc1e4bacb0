"""Read rows from Parquet and JSONL files, with errors that name the file and the row."""

import json
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlx.config.schema import ARITHMETIC
from rlx.errors import ExplainedError


class DataError(ExplainedError, ValueError):
    """A prompt file or one of its rows is not as expected."""


class FormError(DataError):
    """A DataError by its parts; `str` makes one sentence of them."""

    def __init__(self, what: str, got: str, expected: str, remedy: str):
        super().__init__(what, got, expected, remedy)
        self.what, self.got, self.expected, self.remedy = what, got, expected, remedy

    def __str__(self) -> str:
        return f"{self.what}: got {self.got}, expected {self.expected}; {self.remedy}"


class Rows(Protocol):
    """Rows by index; `columns` are those of the file (JSONL: of its first row)."""

    columns: list[str]

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows start..stop-1."""
        ...


class ParquetRows:
    """A Parquet file as an Arrow table; rows become Python objects when they are read."""

    def __init__(self, path: Path):
        import pyarrow as pa  # a check of other files does without it
        import pyarrow.parquet as pq

        self._path = path
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowException, OSError) as fault:
            raise _no_parquet(path, fault) from None
        self.columns = list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows start..stop-1. Raises DataError if one is no text or has a time that Python cannot hold."""
        try:
            return list(self._table.slice(start, stop - start).to_pylist())
        except (ValueError, OverflowError) as fault:
            if stop - start == 1:
                what = f"{type(fault).__name__}: {_first_line(fault)}"
                raise DataError(f"{self._path}, row {start}: cannot be read ({what})") from None
            return [row for number in range(start, stop) for row in self.read(number, number + 1)]


class ListRows:
    """Rows in memory."""

    def __init__(self, rows: list[dict[str, Any]]):
        self._rows = rows
        self.columns = list(rows[0]) if rows else []

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows start..stop-1."""
        return self._rows[start:stop]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, without blank lines.

    Raises:
        DataError: a line is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as fault:
        raise DataError(f"{path}: cannot be read ({fault.strerror})") from None
    return [_parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as fault:
        raise DataError(f"{where}: cannot be read as UTF-8 text ({fault.reason})") from None
    except (ValueError, RecursionError) as fault:
        got = repr(line.decode().strip()[:80])[:80]
        raise DataError(f"{where}: got {got}, expected one JSON object per line ({_first_line(fault)})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: got a JSON {type(row).__name__}, expected an object")
    return row


def _first_line(fault: Exception) -> str:
    return str(fault).partition("\n")[0][:200]


def open_rows(file: str) -> Rows:
    """Open the rows of a `.parquet` or `.jsonl` file.

    Raises:
        DataError: the file is missing, empty, of another kind, or cannot be read.
    """
    path = _path_of(file)
    rows: Rows = ParquetRows(path) if path.suffix == ".parquet" else ListRows(read_jsonl(path))
    if not len(rows):
        raise DataError(f"{file}: {NO_ROWS}")
    return rows


NO_ROWS = "the file has no rows, expected at least one"


class Peek(NamedTuple):
    """What a look at a file shows, without reading it: its columns, its first row, and how many rows it has."""

    columns: list[str]
    first: dict[str, Any]
    rows: int


def peek(file: str, most: int | None = None) -> Peek:
    """Return what a look at a file shows. Lines of JSON are counted no further than `most`. Raises DataError as `open_rows`."""
    path = _path_of(file)
    try:
        return _peek_parquet(path) if path.suffix == ".parquet" else _peek_jsonl(path, most)
    except StopIteration:
        raise DataError(f"{file}: {NO_ROWS}") from None


def _peek_parquet(path: Path) -> Peek:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=True) as opened:
            first = next(opened.iter_batches(batch_size=1)).to_pylist()[0]
            return Peek(list(opened.schema_arrow.names), first, opened.metadata.num_rows)
    except (pa.ArrowException, OSError) as fault:
        raise _no_parquet(path, fault) from None
    except (ValueError, OverflowError) as fault:
        raise DataError(f"{path}, row 0: cannot be read ({type(fault).__name__}: {_first_line(fault)})") from None


def _peek_jsonl(path: Path, most: int | None) -> Peek:
    try:
        with path.open("rb") as opened:
            lines = ((number, line) for number, line in enumerate(opened, 1) if line.strip())
            number, line = next(lines)
            first = _parse_line(line, f"{path}, line {number}")
            return Peek(list(first), first, 1 + sum(1 for _ in islice(lines, None if most is None else most - 1)))
    except OSError as fault:
        raise DataError(f"{path}: cannot be read ({fault.strerror})") from None


def _path_of(file: str) -> Path:
    """Return the path of a file of rows. Raises DataError if it is missing or of another kind."""
    path = Path(file).expanduser()
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{file}: got a file of kind {path.suffix!r}, expected .parquet, .jsonl or `{ARITHMETIC}`")
    if not path.is_file():
        looked = f"looked for {path.absolute()}"
        raise DataError(f"{file}: no such file ({looked}); correct data.train_files or data.val_files")
    return path


def _no_parquet(path: Path, fault: Exception) -> DataError:
    return DataError(f"{path}: cannot be read as Parquet ({_first_line(fault)})")
