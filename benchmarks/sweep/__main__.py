"""Compare every causal language model type of transformers, in every way in which rlx runs it, with transformers alone.

Example: python -m benchmarks.sweep --types qwen2,llama --features packed,boundary
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from benchmarks.sweep.features import FEATURES
from benchmarks.sweep.page import read_results, write_results
from benchmarks.sweep.run import outcomes_of
from tests.tiny_models import rows


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if an outcome is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--types", help="rows of the table, joined by semicolons or commas (default: all)")
    parser.add_argument("--features", help="columns of the table, joined by semicolons or commas (default: all)")
    parser.add_argument("--part", default="1/1", help="of the rows, such as 3/10")
    parser.add_argument("--json", type=Path, help="file to which the outcomes are added")
    options = parser.parse_args(arguments)
    wanted = options.types.split(",") if options.types else rows()
    features = options.features.split(";") if options.features else list(FEATURES)
    part, parts = map(int, options.part.split("/"))
    results, of_file = read_results(options.json) if options.json else ({}, "")
    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    if of_file not in ("", versions):
        parser.error(f"--json {options.json}: got results of {of_file}, expected none or results of {versions}")
    is_wrong = False
    for row in wanted[part - 1 :: parts]:
        began = monotonic()
        found = outcomes_of(row, features)
        print(f"{row}  {monotonic() - began:.1f} s", flush=True)
        for name, outcome in found.items():
            error = "" if outcome.error is None else f"{outcome.error:.0e}"
            print(f"    {name:<12} {outcome.status:<8} {error} {outcome.note[:300]}", flush=True)
            is_wrong |= outcome.status == "wrong"
        results.setdefault(row, {}).update(found)
        if options.json:
            write_results(options.json, results, versions)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
