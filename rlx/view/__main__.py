"""Write a page to look at a run's samples: `python -m rlx.view RUN [--out PAGE] [--steps FIRST:LAST] [--max-mb N]`.

It reads `<run>/transcripts/*.jsonl` and `<run>/metrics.jsonl`, also during the run. The page needs no network and no other file.
"""

import argparse
import sys
from pathlib import Path

from rlx.errors import ExplainedError
from rlx.program import program
from rlx.view.page import printable, write_page

DEFAULT_MB = 64


def _megabytes(text: str) -> float:
    if not 0 <= (value := float(text)) < 1e9:
        raise ValueError
    return value


def main(arguments: list[str]) -> int:
    """Write the page, say where it is, and return the exit code: 0, or 2 if the folder is not as expected."""
    parser = argparse.ArgumentParser(
        prog=program("view"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run, with transcripts/")
    parser.add_argument("--out", type=Path, help="the page (default: view.html in the run's folder)")
    parser.add_argument("--steps", default=":", metavar="FIRST:LAST", help="only these, for example 10:20 or 100:")
    parser.add_argument(
        "--max-mb",
        type=_megabytes,
        default=DEFAULT_MB,
        help=f"largest size of the samples' tokens in the page [10^6 bytes] (default {DEFAULT_MB})",
    )
    options = parser.parse_args(arguments)
    try:
        first, last = (int(text) if text else None for text in options.steps.split(":"))
    except ValueError:
        parser.error(f"--steps: got {options.steps!r}, expected FIRST:LAST, for example 10:20 or 100:")
    out = options.out or options.run / "view.html"
    try:
        page = write_page(options.run, out, first, last, int(options.max_mb * 1e6))
    except (ExplainedError, OSError, RuntimeError) as error:  # RuntimeError: a folder that links to itself
        print(f"{program('view')}: {error}", file=sys.stderr)
        return 2
    print(f"{printable(str(out))}: {page.samples} samples of {page.steps} steps, {out.stat().st_size / 1e6:.1f} MB")
    if not page.samples:
        print("the page shows timelines alone; a run with trainer.transcripts=True keeps its samples")
    if page.left_out:
        print(f"{page.left_out} samples are listed without tokens: raise --max-mb, or choose --steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
