"""Measure how the memory of each process of a run grows from step to step.

`python -m benchmarks.soak --steps 2000` trains a tiny model on the CPU and prints a table with a row per process: its memory
at step `--from-step` and at the end. The memory is resident and private: pages that processes share, such as those of Ray's
object store, are left out. It exits with 1 if the driver, a worker or gcs_server grows by more than `--limit-mb`.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from rlx.models.tiny import TinyModelConfig, make_tiny
from rlx.trainer.tracking import METRICS_FILE

TINY_RUN = (
    *("experiment=arithmetic", "data.arithmetic.train_size=64", "data.arithmetic.val_size=2"),
    *("data.train_batch_size=4", "data.max_response_length=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("actor_rollout_ref.rollout.n=2", "trainer.val_before_train=False", "trainer.test_freq=-1"),
    *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[jsonl]"),
)
PROCESS_NAMES = {
    **{"rlx.driver": "driver", "rlx.main_ppo": "supervisor", "ray::WorkerProcess": "worker"},
    **{"gcs_server": "gcs_server", "raylet/raylet": "raylet"},
}
"""Processes by a part of their command."""
WATCHED = ("driver", "supervisor", "worker", "gcs_server")
WINDOW = 5  # samples at each end, of which the median counts


class Sample(NamedTuple):
    """The memory of one process at one time."""

    step: int
    private_bytes: int


class Growth(NamedTuple):
    """The growth of one process. Steps are those of the samples that were compared."""

    process: str
    first_step: int
    last_step: int
    first_mb: float
    last_mb: float

    @property
    def mb(self) -> float:
        """Growth [10^6 bytes]."""
        return self.last_mb - self.first_mb

    def __str__(self) -> str:
        steps = max(1, self.last_step - self.first_step)
        return (
            f"{self.process:28}{self.first_step:>8}{self.first_mb:>10.1f}{self.last_step:>8}{self.last_mb:>10.1f}"
            f"{self.mb:>+10.2f}{self.mb / steps * 1e3:>+10.2f}"
        )


def growth(process: str, samples: Sequence[Sample], from_step: int) -> Growth | None:
    """Return the growth from the first samples at or after `from_step` to the last ones; None if there are too few."""
    later = [sample for sample in samples if sample.step >= from_step]
    if len(later) < 2:
        return None
    window = min(WINDOW, len(later) // 2)
    ends = [median(each.private_bytes for each in part) / 1e6 for part in (later[:window], later[-window:])]
    return Growth(process, later[0].step, later[-1].step, *ends)


def name_of(process: psutil.Process) -> str:
    """Return a short name: `driver`, `supervisor`, `worker`, `gcs_server`, ... with the process id."""
    command = " ".join(process.cmdline())
    name = next((name for mark, name in PROCESS_NAMES.items() if mark in command), None)
    return f"{name or (command.split('/')[-1].split() or [process.name()])[0]} {process.pid}"[:26]


def watch(run: subprocess.Popen[bytes], folder: Path, steps: int, pause_s: float) -> dict[str, list[Sample]]:
    """Sample the memory of the run's processes until the last step; the report that follows needs memory of its own."""
    samples: dict[str, list[Sample]] = {}
    while run.poll() is None:
        time.sleep(pause_s)
        step = last_step(folder)
        if step >= steps:
            run.wait()
            break
        with contextlib.suppress(psutil.Error):
            for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                with contextlib.suppress(psutil.Error, IndexError):
                    memory = process.memory_info()
                    private = memory.rss - getattr(memory, "shared", 0)
                    samples.setdefault(name_of(process), []).append(Sample(step, private))
    return samples


def last_step(folder: Path) -> int:
    """Return the step of the last row of metrics, 0 before the first."""
    for file in folder.glob(f"runs/*/{METRICS_FILE}"):
        with file.open("rb") as rows:
            rows.seek(max(0, file.stat().st_size - 2**16))
            lines = rows.read().splitlines()
        if lines:
            return int(json.loads(lines[-1])["step"])
    return 0


def table(found: Mapping[str, Growth]) -> str:
    """Return one line per process, those that grew most first."""
    head = f"{'process':28}{'step':>8}{'MB':>10}{'step':>8}{'MB':>10}{'grew MB':>10}{'kB/step':>10}"
    return "\n".join([head, *map(str, sorted(found.values(), key=lambda each: -each.mb))])


def main(arguments: Sequence[str]) -> int:
    """Run, print, and return the exit code."""
    about = (__doc__ or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=about)
    parser.add_argument("--steps", type=int, default=2000, help="training steps (default 2000)")
    parser.add_argument("--from-step", type=int, default=500, help="growth counts from here (default 500)")
    parser.add_argument("--limit-mb", type=float, default=4.0, help="allowed growth of a process (default 4)")
    parser.add_argument("--pause-s", type=float, default=2.0, help="seconds between samples (default 2)")
    parser.add_argument("--json", type=Path, help="file to write all samples to: process -> [[step, bytes], ...]")
    parser.add_argument("overrides", nargs="*", help="further key=value of the run")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for part in make_tiny(TinyModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)):
            part.save_pretrained(folder / "model")
        keys = (f"actor_rollout_ref.model.path={folder}/model", f"trainer.default_local_dir={folder}/runs")
        steps = f"trainer.total_training_steps={options.steps}"
        command = [sys.executable, "-m", "rlx.main_ppo", *TINY_RUN, *keys, steps, *options.overrides]
        output, environment = folder / "output.log", {"OMP_NUM_THREADS": "1", **os.environ}
        with output.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as run:
            samples = watch(run, folder, options.steps, options.pause_s)
        if run.returncode:
            print("\n".join(output.read_text().splitlines()[-20:]))
        found = {name: each for name, of in samples.items() if (each := growth(name, of, options.from_step))}
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(samples))
    tall = [name for name, each in found.items() if name.split()[0] in WATCHED and each.mb > options.limit_mb]
    if run.returncode or tall or not found:
        print(f"exit code of the run: {run.returncode}; grew by more than {options.limit_mb:g} MB: {tall or 'none'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
