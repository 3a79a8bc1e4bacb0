"""Train several runs at the same time, each in a process and a folder of its own, in equal parts of this machine's GPUs.

A small model leaves most of a GPU idle, and all of it while it starts. Each run gets its part of the memory for good: sleeping vLLMs
would measure each other's memory, and stop if it grew. The first run starts alone, so that the others find its compiled kernels.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.common import chosen_device, title
from rlx.config.compose.command_line import compose
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Machine, on_accelerator
from rlx.config.vllm_range import ENGINE_BYTES
from rlx.offload.plan.decoder import Decoder
from rlx.trainer.tracking import METRICS_FILE, read_metrics

LOOK_S, TELL_S = 1.0, 20.0  # between two looks at the runs, and two lines where no terminal redraws one
LOG, KEYS, FINISHED, SHARED, MACHINE = "output.log", "keys.json", "finished", "shared", "machine"  # in a run's folder
OBJECT_STORE_BYTES = 2_000_000_000  # of each Ray; by default it takes a third of the memory
POLICY, ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.rollout"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
SHARES, TOKENS = (0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2), (16384, 8192, 4096, 2048)
"""vLLM's share of a part of the GPU, and tokens of a micro-batch; the first pair that fits is taken."""
HELD = 1.2  # times the predicted peak: nine runs of 8.5 GB held up to 10.2 of an H100, with contexts and free segments


class Job(NamedTuple):
    """A run: its name in the line of progress, its folder, its keys and its number of steps."""

    name: str
    folder: Path
    overrides: Sequence[str]
    steps: int

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """The metrics of a run that may have begun several times before its first checkpoint."""
        found = [read_metrics(file) for file in sorted(self.folder.glob(f"runs/*/{METRICS_FILE}"))]
        return max(found, key=lambda metrics: max(metrics, default=-1), default={})

    @property
    def finished(self) -> bool:
        return (self.folder / FINISHED).exists()

    @property
    def shared(self) -> bool:
        """Whether it ran beside others on one GPU, or CPU."""
        return (self.folder / SHARED).exists()

    @property
    def machine(self) -> str:
        """Where it ran last, such as "NVIDIA H200, torch 2.11.0"."""
        return (self.folder / MACHINE).read_text() if (self.folder / MACHINE).exists() else ""


def part_of_gpu(overrides: Sequence[str], machine: Machine, parts: int) -> tuple[str, ...]:
    """Return the keys with which a run fits into one of equal parts of each GPU. They change no curve, up to rounding.

    Raises ValueError if the forecast finds none.
    """
    config = compose(overrides).config
    if parts == 1 or not on_accelerator(config, machine) or machine.device_bytes is None:
        return ()
    part_bytes = int(machine.device_bytes / parts / HELD)
    part = replace(machine, device_bytes=part_bytes)
    alone = (f"{ROLLOUT}.engines_per_gpu=1", f"{ROLLOUT}.free_cache_engine=False")
    for share, tokens in itertools.product(SHARES, TOKENS):
        keys = (*alone, f"{POLICY}.actor.ppo_max_token_len_per_gpu={tokens}")
        forecast = MemoryForecast.of(compose([*overrides, *keys, f"{SHARE}={share}"]).config, part)
        actor = forecast.known["actor"]
        weights = 2 * actor.parameters if isinstance(actor, Decoder) else 0
        cache = int(share * part_bytes) - weights - ENGINE_BYTES
        if cache > 0 and not forecast.oversized():
            # vLLM would take other runs' memory for its own if it measured how much is left for its cache.
            keys += (f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={cache}",)
            keys += (f"{SHARE}={share / parts / HELD:.4f}",)
            return (*keys, f"ray_kwargs.ray_init.object_store_memory={OBJECT_STORE_BYTES}")
    raise ValueError(f"{parts} runs do not fit on a GPU of {machine.device_bytes / 1e9:.0f} GB by the forecast")


class SideBySide:
    """Runs jobs, at most `together` at a time, until a time of the clock or SIGTERM. Then they save."""

    def __init__(self, jobs: Sequence[Job], together: int, machine: Machine, until: float, console: Console):
        self._jobs, self._machine, self._together = jobs, machine, together
        self._until, self._console = until, console
        gpus = machine.gpus or 1
        self._parts = math.ceil(together / gpus)  # of each GPU
        self._places = [place % gpus for place in range(together)]
        self._running: dict[Job, tuple[subprocess.Popen[bytes], int]] = {}
        self._failed: dict[Job, int] = {}  # with their exit codes
        self._is_stopping = False

    def run(self) -> bool:
        """Return whether all jobs have finished in time. If one fails, exit once those that run have ended."""
        signal.signal(
            signal.SIGTERM, lambda *_: setattr(self, "_until", 0.0)
        )  # else the runs would outlive this process
        waiting = [job for job in self._jobs if not job.finished]
        commands = {job: self._command(job) for job in waiting}
        try:
            with self._console.status("") as status:
                told = time.time()
                while self._running or (waiting and not self._failed and time.time() < self._until):
                    is_warm = not self._running or any(job.metrics for job in self._jobs)
                    if waiting and not self._failed and self._places and is_warm and time.time() < self._until:
                        self._start(job := waiting.pop(0), commands[job])
                        continue
                    if time.time() >= self._until:
                        self._stop()
                    self._collect()
                    status.update(line := self._line())
                    if not self._console.is_terminal and time.time() > told + TELL_S:
                        self._console.print(line)
                        told = time.time()
                    time.sleep(LOOK_S)
        except KeyboardInterrupt:  # the runs got it, too
            for process, _ in self._running.values():
                process.wait()
            raise
        if self._failed:
            sys.exit("\n".join(self._end(job, commands[job], code) for job, code in self._failed.items()))
        return all(job.finished for job in self._jobs)

    def _command(self, job: Job) -> list[str]:
        """Return a run's command, and keep its keys; exit if its folder has a run with others."""
        job.folder.mkdir(parents=True, exist_ok=True)
        given = job.folder / KEYS
        if given.exists() and json.loads(given.read_text()) != [*job.overrides]:
            sys.exit(
                f"{job.folder} has a run with other keys: see {KEYS} there; give another --out, or delete the folder"
            )
        given.write_text(json.dumps([*job.overrides], indent=2))
        part = part_of_gpu(job.overrides, self._machine, self._parts)
        return [sys.executable, "-m", "rlx.main_ppo", *job.overrides, *part]

    def _start(self, job: Job, command: Sequence[str]) -> None:
        place, environment = self._places.pop(0), dict(os.environ)
        if self._together > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, self._machine.cpus // self._together)))
            if self._machine.gpus > 1:
                visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self._machine.gpus)))
                environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place]
        if self._parts > 1:
            (job.folder / SHARED).touch()
        (job.folder / MACHINE).write_text(title(chosen_device()))
        with (job.folder / LOG).open("a") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self._running[job] = process, place

    def _stop(self) -> None:
        """Let the runs end their step and save."""
        if not self._is_stopping:
            self._is_stopping = True
            for process, _ in self._running.values():
                process.send_signal(signal.SIGTERM)

    def _collect(self) -> None:
        """Note the runs that have ended."""
        for job, (process, place) in [*self._running.items()]:
            if (code := process.poll()) is None:
                continue
            del self._running[job]
            self._places.append(place)
            if self._is_stopping:
                continue
            if code:
                self._failed[job] = code
            else:
                (job.folder / FINISHED).touch()

    def _line(self) -> str:
        return ", ".join(f"{job.name} {max(job.metrics, default=0)}/{job.steps}" for job in self._jobs)

    def _end(self, job: Job, command: Sequence[str], code: int) -> str:
        last = "\n".join((job.folder / LOG).read_text(errors="replace").splitlines()[-15:])
        return f"{' '.join(command)} ended with exit code {code}; {job.folder / LOG} ends in:\n{last}"
