"""Measure how long a run takes to its first step, and to end after its last.

python -m benchmarks.start_up [--shape NAME] [key=value ...]

Each round is a run of two steps in a process of its own. The default is `rlx train` with no key, whose warm start comes from the
cache; with `--shape` a GRPO run on a model of random weights. The first round has empty caches of vLLM, torch, Triton and CUDA, and
fills them for the others. The tables have the seconds from the command to each line on the screen up to the row of the first step,
and from the row of the last step to the end of the process.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import benchmark_parser, chosen_device, title, write_json
from benchmarks.race.inputs import settings, write_inputs
from rlx.offload.plan.shapes import SHAPES

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
ROW = re.compile(r"\s*(\d+)/\d+\s")
WORK = {"prompts": 8, "samples": 8, "prompt": 128, "response": 64, "updates": 1, "micro_batch": 8, "steps": 2}
WIDTH = 100


class Round(NamedTuple):
    """The lines of a run on the screen, each with its seconds since the command, and the seconds at which the process ended."""

    lines: list[tuple[float, str]]
    ended_s: float

    @property
    def rows_s(self) -> list[float]:
        """Seconds at which the rows of steps came, without the row of a validation before them."""
        return [at for at, text in self.lines if (row := ROW.match(text)) and row[1] != "0"]

    @property
    def first_row_s(self) -> float:
        """Seconds from the command to the row of the first step."""
        return self.rows_s[0]

    @property
    def end_s(self) -> float:
        """Seconds from the row of the last step to the end of the process."""
        return self.ended_s - self.rows_s[-1]


def timed(command: Sequence[str], environment: dict[str, str]) -> Round:
    """Run a command and return what it printed. Raises RuntimeError if it fails or shows no row."""
    began, lines = time.perf_counter(), []
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipe) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip()))
    found = Round(lines, time.perf_counter() - began)
    if process.returncode or not found.rows_s:
        printed = "\n".join(text for _, text in lines)[-8000:]
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}:\n{printed}")
    return found


def show(found: Sequence[Round]) -> None:
    """Print the timeline of the round whose first row has the median time, then the seconds of all rounds.

    Args:
        found: rounds with caches alike.
    """
    middle = sorted(found, key=lambda each: each.first_row_s)[len(found) // 2]
    for at, text in middle.lines:
        if text.strip() and at <= middle.first_row_s:
            print(f"{at:7.1f} s  {text[:WIDTH]}")
    for name, seconds in (
        ("first row", [each.first_row_s for each in found]),
        ("end after the last row", [each.end_s for each in found]),
    ):
        every = ", ".join(f"{second:.1f}" for second in seconds)
        print(f"{name}: median {statistics.median(seconds):.1f} s of {every}", flush=True)


def options_of(arguments: list[str] | None) -> tuple[Namespace, list[str]]:
    """Read the command line; return also the keys of the run."""
    parser: ArgumentParser = benchmark_parser("start_up", __doc__ or "")
    parser.set_defaults(rounds=3, **WORK)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="of a model with random weights (default: builtin:tiny)"
    )
    return parser.parse_known_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options, overrides = options_of(arguments)
    device = chosen_device(options.device)
    with tempfile.TemporaryDirectory(prefix="rlx-start-up-") as made:
        folder = Path(made)
        keys = ["trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1"]
        if options.shape:
            keys = [*settings(options), *write_inputs(folder, options, device)]
        keys += [
            "trainer.logger=[console]",
            f"trainer.default_local_dir={folder / 'runs'}",
            "trainer.resume_mode=disable",
        ]
        command = [sys.executable, "-m", "rlx.main_ppo", *keys, *overrides]
        environment = {name: str(folder / name.lower()) for name in CACHES}
        print(f"{title(device)}, {options.shape or 'the default run'}, empty caches", flush=True)
        found = [timed(command, environment)]
        show(found)
        if options.rounds:
            print("filled caches", flush=True)
            found += [timed(command, environment) for _ in range(options.rounds)]
            show(found[1:])
    # The first of each is that with empty caches
    figures = {"first_row_s": [each.first_row_s for each in found], "end_s": [each.end_s for each in found]}
    write_json(options, device, {"keys": overrides, **figures})


if __name__ == "__main__":
    main()
