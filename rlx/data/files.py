"""Read rows from Parquet and JSONL files, with errors that name the file and the row."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

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


class ParquetRows:
    """A Parquet file as an Arrow table; rows become Python objects when they are read."""

    def __init__(self, path: Path):
        import pyarrow as pa  # a check of other files does without it
        import pyarrow.parquet as pq

        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowException, OSError) as fault:
            raise _no_parquet(path, fault) from None
        self.columns = list(self._table.column_names)

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


def read_jsonl(path: Path) -> ListRows:
    """Return the rows of a JSON Lines file, without blank lines. Raises DataError if it cannot be read, or has no usable line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as fault:
        raise DataError(f"{path}: cannot be read ({fault.strerror})") from None
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    rows = ListRows([_parse_line(lines[number - 1]) for number in numbers], numbers)
    if not rows.columns:
        faults = RowFaults()
        for index, row in enumerate(rows.read(0, len(rows))):
            if isinstance(row, RowFault):
                faults.add(str(path), rows, index, row)
        faults.end()
    return rows


def _parse_line(line: bytes) -> Row:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as fault:
        return RowFault(f"cannot be read as UTF-8 text ({fault.reason})", "save the file as UTF-8")
    except (ValueError, RecursionError) as fault:
        got = repr(line.decode().strip()[:80])[:80]
        return RowFault(f"got {got}, expected one JSON object per line ({_first_line(fault)})")
    if not isinstance(row, dict):
        return RowFault(f"got a JSON {type(row).__name__}, expected an object")
    return row


def _first_line(fault: Exception) -> str:
    return str(fault).partition("\n")[0][:200]


def open_rows(file: str) -> Rows:
    """Open the rows of a `.parquet` or `.jsonl` file.

    Raises:
        DataError: the file is missing, empty, of another kind, or cannot be read.
    """
    path = _path_of(file)
    rows: Rows = ParquetRows(path) if path.suffix == ".parquet" else read_jsonl(path)
    if not len(rows):
        raise DataError(f"{file}: {NO_ROWS}")
    return rows


NO_ROWS = "the file has no rows, expected at least one"


class Peek(NamedTuple):
    """What a look at a file shows, without reading it: its columns, its first row, and how many rows it has."""

    columns: list[str]
    first: Row
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
            batch = next(opened.iter_batches(batch_size=1))
            columns, rows = list(opened.schema_arrow.names), opened.metadata.num_rows
    except (pa.ArrowException, OSError) as fault:
        raise _no_parquet(path, fault) from None
    try:
        return Peek(columns, batch.to_pylist()[0], rows)
    except (ValueError, OverflowError) as fault:
        return Peek(columns, _unreadable(fault), rows)


def _unreadable(fault: Exception) -> RowFault:
    return RowFault(f"cannot be read ({type(fault).__name__}: {_first_line(fault)})")


def _peek_jsonl(path: Path, most: int | None) -> Peek:
    try:
        with path.open("rb") as opened:
            lines = (line for line in opened if line.strip())
            first = _parse_line(next(lines))
            columns = [] if isinstance(first, RowFault) else list(first)
            return Peek(columns, first, 1 + sum(1 for _ in islice(lines, None if most is None else most - 1)))
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
