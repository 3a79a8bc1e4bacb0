"""Convert GSM8K's official rows to verl's schema (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).

python -m rlx.data.gsm8k --out DIR                              from the hub
python -m rlx.data.gsm8k --train train.jsonl --test test.jsonl --out DIR
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from rlx.data.files import GSM8K_SOURCE, DataError, RowFault, RowFaults, Rows, gsm8k_row, open_rows
from rlx.program import program
from rlx.row_files import DATA_KINDS, data_kind

ANSWER_S = 5.0  # for the hub to answer


def read_official(source: str, split: str) -> Rows:
    """Return the official rows of a split (train or test) from a local file or the hub. Raises DataError."""
    if data_kind(source) in DATA_KINDS or Path(source).expanduser().exists():
        return open_rows(source)
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        if not HF_HUB_OFFLINE:
            HfApi().dataset_info(source, timeout=ANSWER_S)  # load_dataset alone would try for 24 s
        return Rows(list(load_dataset(source, "main", split=split)))
    except Exception as fault:  # of the client's HTTP library, which is another in each version
        raise DataError(
            f"{source}: no such file, and the hub did not return it as a data set ({type(fault).__name__}: {fault}); "
            f"go online, pass a downloaded file with --{split}, or set HF_HUB_OFFLINE=1 if the hub's cache here has it"
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
            rows.append(gsm8k_row(row, split, index))
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
    parser = argparse.ArgumentParser(
        prog=program("gsm8k"), description="Write GSM8K as Parquet files with chat prompts."
    )
    for split in ("train", "test"):
        official = f"the official {split}.jsonl, or a data set on the Hugging Face Hub (default: %(default)s)"
        parser.add_argument(f"--{split}", default=GSM8K_SOURCE, metavar="FILE", help=official)
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
