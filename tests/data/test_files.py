import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlx.data.files import DataError, open_rows

ROWS = [{"a": i, "b": [{"x": str(i)}]} for i in range(5)]


def test_parquet_and_jsonl_give_the_same_rows(write_jsonl, tmp_path):
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), parquet, row_group_size=2)
    for file in (str(parquet), write_jsonl(ROWS)):
        rows = open_rows(file)
        assert len(rows) == 5 and rows.columns == ["a", "b"]
        assert rows.read(1, 4) == ROWS[1:4]


def test_blank_lines_do_not_count(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n  \n')
    assert open_rows(str(path)).read(0, 9) == [{"a": 1}, {"a": 2}]


def test_missing(tmp_path):
    with pytest.raises(DataError, match=r"no\.parquet: no such file .*data\.train_files"):
        open_rows(str(tmp_path / "no.parquet"))


@pytest.mark.parametrize("name", ["rows.csv", "rows", "builtin:arithmetics"])
def test_unknown_kind(name):
    with pytest.raises(DataError, match=r"expected \.parquet, \.jsonl or `builtin:arithmetic`"):
        open_rows(name)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_jsonl(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="has no rows"):
        open_rows(str(path))


def test_empty_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="has no rows"):
        open_rows(str(path))


@pytest.mark.parametrize(
    "content, what",
    [
        (b'\n{"a": \n', r"line 2: got '\{\"a\":', expected one JSON object per line"),
        (b"[1]\n", "line 1: got a JSON list, expected an object"),
        (b'{"a": "\xff"}\n', "cannot be read as UTF-8"),
    ],
)
def test_broken_jsonl(tmp_path, content, what):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what):
        open_rows(str(path))


def test_broken_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_rows(str(path))
