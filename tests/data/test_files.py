import bz2
import gzip
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from rlx.data.files import DataError, parts_of

ROWS = [{"a": i, "b": [{"x": str(i)}]} for i in range(5)]


def open_rows(file):
    (part,) = parts_of(file)
    return part.open()


def test_parquet_and_jsonl_give_the_same_rows(write_jsonl, tmp_path):
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), parquet, row_group_size=2)
    for file in (str(parquet), write_jsonl(ROWS)):
        rows = open_rows(file)
        assert len(rows) == 5 and rows.columns == ["a", "b"]
        assert rows.read(1, 4) == ROWS[1:4]
        (part,) = parts_of(file)
        assert part.count() == 5 and part.open(1).read(0, 5) == ROWS[:1]


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.gz"])
def test_a_file_that_is_missing_or_of_an_unknown_kind(name, tmp_path):
    with pytest.raises(DataError, match=f"{name}: no such file .*data\\.train_files"):
        open_rows(str(tmp_path / name))
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=r"expected \.parquet, \.jsonl, \.json, \.csv, \.tsv or `builtin:arithmetic`"):
        open_rows(str(tmp_path / name))


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_lines(tmp_path, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES))
    rows = open_rows(str(path))
    assert rows.read(0, 5) == ROWS and rows.place(4) == "line 5"
    assert [parts_of(str(path))[0].count(most) for most in (None, 2)] == [5, 2]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        open_rows(str(path))


@pytest.mark.parametrize("text", [LINES, json.dumps(ROWS, indent=1).encode(), b"\xef\xbb\xbf" + LINES])
def test_plain_json_may_be_a_list_or_lines(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_bytes(text)
    rows, place = open_rows(str(path)), "row 2" if text[:1] == b"[" else "line 2"
    assert rows.read(0, 5) == ROWS and rows.place(1) == place


def test_cells_of_a_table_are_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,answer\n"two\nlines",NA\nb,007\nc,\n', encoding="utf-8-sig")
    rows = open_rows(str(path))
    assert rows.columns == ["prompt", "answer"]
    assert rows.read(0, 3) == [dict(prompt=p, answer=a) for p, a in (("two\nlines", "NA"), ("b", "007"), ("c", ""))]
    assert rows.place(1) == "row 2"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('a,b\n1,2\n3,"4\n5,6\n', r"row 2 cannot be read .*; put quotes"),
        ("a,b,b\n1,2,3\n", "expected different names"),
        ("a;b\n1;2\n", r"columns with ';' between them, expected ','; write"),
        ("a,b\n1,ä\n", "save the file as UTF-8"),
    ],
)
def test_a_table_that_cannot_be_read_whole_is_rejected(tmp_path, text, fault):
    (tmp_path / "rows.csv").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=fault):
        open_rows(str(tmp_path / "rows.csv"))


def test_a_folder_of_save_to_disk(tmp_path):
    data = Dataset.from_list(ROWS)
    data.select([4, 0]).save_to_disk(tmp_path / "saved")
    assert open_rows(str(tmp_path / "saved")).read(0, 2) == [ROWS[4], ROWS[0]]
    DatasetDict(train=data).save_to_disk(tmp_path / "splits")
    assert open_rows(str(tmp_path / "splits" / "train")).read(0, 5) == ROWS


@pytest.mark.parametrize("name", ["{folder}", "{folder}/*.jsonl", "memory://data/*.jsonl"])
def test_shards_come_in_the_order_of_their_names(tmp_path, name):
    memory = fsspec.filesystem("memory")
    for number, row in enumerate(ROWS):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps(row))
        memory.pipe(f"/data/part{number}.jsonl", json.dumps(row).encode())
    parts = parts_of(name.format(folder=tmp_path))
    assert [part.open().read(0, 1)[0] for part in parts] == ROWS
    assert [part.name.endswith(f"part{number}.jsonl") for number, part in enumerate(parts)] == [True] * 5


def test_one_file_of_a_url(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    fsspec.filesystem("memory").pipe("/one.parquet", path.read_bytes())
    assert open_rows("memory://one.parquet").read(0, 5) == ROWS
    for url, what in (("memory://none.jsonl", "FileNotFoundError"), ("nothing://a.jsonl", "Protocol not known")):
        with pytest.raises(DataError, match=f"{url}: cannot be fetched .*{what}"):
            open_rows(url)
