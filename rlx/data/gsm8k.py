"""Convert GSM8K's official rows to verl's schema (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).

python -m rlx.data.gsm8k --out DIR                              from the hub
python -m rlx.data.gsm8k --train train.jsonl --test test.jsonl --out DIR
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from rlx.data.files import DataError, ListRows, RowFault, RowFaults, Rows, open_rows
from rlx.program import program

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_COLUMNS = ("question", "answer")
INSTRUCTION = "Work through this step by step. Then give the final answer alone on the last line, as `#### <number>`."


def to_row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
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
        raise RowFault(
            f"got an answer that ends in {working[-40:] + mark + final!r:.80}, expected `#### <number>` at its end"
        )
    return {
        "data_source": GSM8K_SOURCE,
        "prompt": [{"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split, "question": question, "answer": answer},
    }


def read_official(source: str, split: str) -> Rows:
    """Return the official rows of a split (train or test) from a local file or the hub. Raises DataError."""
    if Path(source).suffix or Path(source).expanduser().exists():
        return open_rows(source)
    from datasets import load_dataset

    try:
        return ListRows(list(load_dataset(source, "main", split=split)))
    except (OSError, ValueError) as fault:
        raise DataError(
            f"{source}: no such file, and the hub did not give it as a data set ({type(fault).__name__}: {fault}); "
            f"go online, or pass a downloaded file with --{split}"
        ) from None


def convert(source: str, split: str, out: Path, console: Console) -> Path:
    """Write `out`/<split>.parquet from an official file or the hub. Raises DataError for a faulty source or row."""
    import pyarrow as pa  # a check of the form of rows does without it
    import pyarrow.parquet as pq

    official = read_official(source, split)
    if not len(official):
        raise DataError(f"{source}: no rows, expected GSM8K's {split} split")
    rows, faults = [], RowFaults()
    for index, row in enumerate(track(official.read(0, len(official)), f"{split:5}", console=console)):
        try:
            if isinstance(row, RowFault):
                raise row
            rows.append(to_row(row, split, index))
        except RowFault as fault:
            faults.add(source, official, index, fault)
    faults.end()
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{split}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), target)
    console.print(f"{len(rows):,} rows in {target}")
    return target


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog=program("gsm8k"), description="Turn GSM8K into Parquet with chat prompts.")
    for split in ("train", "test"):
        official = f"official {split}.jsonl, or a hub name (default: %(default)s)"
        parser.add_argument(f"--{split}", default=GSM8K_SOURCE, metavar="FILE", help=official)
    folder = "folder for train.parquet and test.parquet"
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help=folder)
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        for split in ("train", "test"):
            convert(getattr(given, split), split, given.out, console)
    except (DataError, OSError) as fault:
        console.print(f"error: {fault}", style="red", markup=False, highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
