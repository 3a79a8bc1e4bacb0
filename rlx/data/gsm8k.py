"""Convert GSM8K's official rows to verl's schema (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).

python -m rlx.data.gsm8k --out DIR                              from the hub
python -m rlx.data.gsm8k --train train.jsonl --test test.jsonl --out DIR
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from rlx.data.files import DataError, RowFault, RowFaults, gsm8k_row, parts_of
from rlx.program import program

GSM8K_FILES = "hf://datasets/openai/gsm8k/main/{split}-*.parquet"


def convert(source: str, split: str, out: Path, console: Console) -> Path:
    """Write `out`/<split>.parquet from official files. Raises DataError for a faulty source or row."""
    import pyarrow as pa  # a check of the form of rows does without it
    import pyarrow.parquet as pq

    rows, faults = [], RowFaults()
    for part in parts_of(source):
        official = part.open()
        for index, row in enumerate(track(official.read(0, len(official)), f"{split:5}", console=console)):
            try:
                if isinstance(row, RowFault):
                    raise row
                rows.append(gsm8k_row(row, split, len(rows)))
            except RowFault as fault:
                faults.add(part.name, official, index, fault)
    faults.end()
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{split}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), target)
    console.print(f"{len(rows):,} rows in {target}")
    return target


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog=program("gsm8k"), description="Write GSM8K as Parquet files with chat prompts."
    )
    for split in ("train", "test"):
        official = f"the official {split}.jsonl, or a folder, pattern or URL of such rows (default: %(default)s)"
        files = GSM8K_FILES.format(split=split)
        parser.add_argument(f"--{split}", default=files, metavar="FILE", help=official)
    folder = "folder to write train.parquet and test.parquet to"
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help=folder)
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        for split in ("train", "test"):
            convert(getattr(given, split), split, given.out, console)
    except (DataError, OSError) as fault:
        console.print(f"{parser.prog}: {fault}", style="red", markup=False, highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
