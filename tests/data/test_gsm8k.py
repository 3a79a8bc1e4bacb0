import pyarrow.parquet as pq
import pytest

from rlx.data import gsm8k
from rlx.data.files import gsm8k_row, parts_of


def test_row():
    row = gsm8k_row({"question": "How many? ", "answer": "2*600=1200\n#### 1,200"}, "train", 3)
    (message,) = row["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("How many?\n\n") and "####" in message["content"]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert (row["extra_info"].pop("index"), row["extra_info"].pop("split")) == (3, "train")
    assert row["extra_info"] == {"question": "How many? ", "answer": "2*600=1200\n#### 1,200"}


@pytest.mark.parametrize(
    "row, what",
    [
        ({"question": "q"}, "got question 'q' and answer None, expected two texts"),
        ({"question": 5, "answer": "#### 5"}, "got question 5"),
        ({"question": "q", "answer": "It is 5."}, "expected `#### <number>` at its end"),
        ({"question": "q", "answer": "It is 5. ####  "}, "expected `#### <number>` at its end"),
    ],
)
def test_row_faults(row, what):
    with pytest.raises(ValueError, match=what):
        gsm8k_row(row, "train", 0)


def test_command(gsm8k_file, tmp_path):
    out = tmp_path / "new" / "folder"
    assert gsm8k.main(["--train", gsm8k_file.replace("tiny", "*"), "--test", gsm8k_file, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"train.parquet", "test.parquet"}
    rows = pq.read_table(out / "test.parquet").to_pylist()
    official = parts_of(gsm8k_file)[0].open().read(0, 100)
    assert rows == [gsm8k_row(row, "test", i) for i, row in enumerate(official)]


def test_command_names_the_row_at_fault(write_jsonl, gsm8k_file, tmp_path, capsys):
    bad = write_jsonl([{"question": "q", "answer": "#### 1"}, {"question": "q", "answer": "none"}])
    assert gsm8k.main(["--train", gsm8k_file, "--test", bad, "--out", str(tmp_path)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "line 2: got an answer that ends in" in shown and "Traceback" not in shown


def test_command_without_a_file(gsm8k_file, tmp_path, capsys):
    assert gsm8k.main(["--train", str(tmp_path / "no.jsonl"), "--test", gsm8k_file, "--out", str(tmp_path)]) == 2
    assert "no.jsonl" in capsys.readouterr().err.replace("\n", "")
