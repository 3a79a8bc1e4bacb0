"""Write sums and differences as rows of a prompt and its answer: FOLDER/train.jsonl and FOLDER/held_out.jsonl.

    python examples/real_model/sums.py sums                  # of two numbers from 0 to 99
    python examples/real_model/sums.py small --largest 30

No question of `held_out.jsonl`, 500 rows, is in `train.jsonl`. The same command writes the same rows.
"""

import argparse
import json
from pathlib import Path
from random import Random

HELD_OUT = 500


def write_sums(folder: Path, largest: int) -> None:
    pairs = [(first, second) for first in range(largest + 1) for second in range(largest + 1)]
    found = [(f"{first} + {second}", first + second) for first, second in pairs]
    found += [(f"{first} - {second}", first - second) for first, second in pairs if first >= second]
    Random(0).shuffle(found)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"held_out": found[:HELD_OUT], "train": found[HELD_OUT:]}.items():
        rows = [{"prompt": f"What is {text}? Answer with the number alone.", "answer": str(n)} for text, n in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--largest", type=int, default=99, help="number, at least 20 (default 99)")
    given = parser.parse_args()
    if given.largest < 20:
        parser.error(f"--largest: got {given.largest}, expected at least 20, because {HELD_OUT} questions are held out")
    write_sums(given.folder, given.largest)
