"""Read rows from Parquet and JSONL files, with errors that name the file and the row."""

import json
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rlx.config.schema import ARITHMETIC
from rlx.errors import ExplainedError


class DataError(ExplainedError, ValueError):
    """A prompt file or one of its rows is not as expected."""


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
        self._path = path
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowException, OSError) as fault:
            raise DataError(f"{path}: cannot be read as Parquet ({_first_line(fault)})") from None
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
    path = Path(file).expanduser()
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{file}: got a file of kind {path.suffix!r}, expected .parquet, .jsonl or `{ARITHMETIC}`")
    if not path.is_file():
        looked = f"looked for {path.absolute()}"
        raise DataError(f"{file}: no such file ({looked}); correct data.train_files or data.val_files")
    rows: Rows = ParquetRows(path) if path.suffix == ".parquet" else ListRows(read_jsonl(path))
    if not len(rows):
        raise DataError(f"{file}: the file has no rows, expected at least one")
    return rows
