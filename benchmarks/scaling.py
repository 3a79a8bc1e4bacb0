"""Measure training on several GPUs of one machine, with random weights: one case after the other, each with a limit of its own.

    python -m benchmarks.scaling CASE ... --shape qwen2-7b --gpus 4 [--limit 540] [key=value ...]
    python -m benchmarks.scaling          # only the tables of --json

Each case appends a JSON line to `--json` when it ends, is cut off or fails, and its output to `--folder`. At the end the command
prints a table for each case, with a column for each number of GPUs; `x N GPUs` is the speed of a GPU relative to that with N GPUs.
Cases of GRPO have the same work for each GPU, and further keys go to their runs.
"""

import json
import math
import re
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.common import GB, chosen_device, running, title, wait_at_most
from benchmarks.race.inputs import PHASE, add_work, medians, settings, write_inputs
from rlx.offload.plan.decoder import read_decoder
from rlx.offload.plan.shapes import SHAPES
from rlx.trainer.tracking import METRICS_FILE, read_metrics

Figures = dict[str, float]
POLICY = "actor_rollout_ref"
FSDP, REF_FSDP, MODEL = f"{POLICY}.actor.fsdp_config", f"{POLICY}.ref.fsdp_config", f"{POLICY}.model"
LARGE = 2e9  # weights, from which on states and activations wait on the host
OF_LARGE = (
    f"{MODEL}.enable_activation_offload=True",
    *(f"{FSDP}.{name}=True" for name in ("param_offload", "optimizer_offload")),
    f"{REF_FSDP}.param_offload=True",
)
ADAPTERS = (f"{MODEL}.lora_rank=32", f"{MODEL}.lora_alpha=64", f"{MODEL}.layer_offload=True")
STREAMED = (*ADAPTERS, f"{MODEL}.enable_activation_offload=True", f"{FSDP}.model_dtype=bf16")
WORKER = "ray::WorkerProcess"
SAVED_STEP, LAST_STEP = 2, 4  # of the run that loses a worker
POLL_S = 0.1
ROWS = 1024  # prompts of all runs with one shape and one length
SPEEDS = ("generation", "update", "step")


class Job(NamedTuple):
    """One case of a command.

    Args:
        options: of the command line.
        overrides: further keys of runs.
        inputs: keys of model, prompts and reward.
        folder: for files of the case.
        until: when it has to end, by `time.monotonic` [s].
    """

    options: Namespace
    overrides: list[str]
    inputs: list[str]
    folder: Path
    until: float

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.until - time.monotonic()

    @property
    def log(self) -> Path:
        """The file with the output of the case's programs."""
        return self.folder / "output.log"

    def program(self, module: str, *arguments: str) -> list[str]:
        """Return a command; it begins the log."""
        with self.log.open("a") as file:
            file.write(f"$ python -m {module} {' '.join(arguments)}\n")
        return [sys.executable, "-m", module, *arguments]

    def training(self, *keys: str, gpus: int = 0, prompts: int = 0) -> list[str]:
        """Return the command of a GRPO run."""
        given = self.options
        work = Namespace(**{**vars(given), "prompts": prompts or given.prompts})
        large = OF_LARGE if read_decoder(SHAPES[given.shape]).parameters > LARGE else ()
        own = ("trainer.logger=[console,jsonl]", f"trainer.default_local_dir={self.folder / 'runs'}")
        # At the usual 1e-6 one update doubled the lengths.
        rate = (f"{POLICY}.actor.optim.lr=1e-9",) if given.mean_response else ()
        base = [*settings(work, gpus or given.gpus), *self.inputs, *own, *rate]
        if not any(key.startswith(MODEL) for key in keys):
            base += large
        return self.program("rlx.main_ppo", *base, *keys, *self.overrides)

    def finish(self, command: Sequence[str]) -> None:
        """Run a command. Raises RuntimeError if it fails or is cut off."""
        with running(command, self.log) as process:
            self.end_of(wait_at_most(process, self.left_s))

    def end_of(self, code: int | None) -> None:
        """Raise RuntimeError for an exit code that is no success."""
        if code != 0:
            raise RuntimeError(f"cut off after {self.options.limit:g} s" if code is None else f"exit code {code}")

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the metrics of the newest run."""
        files = sorted((self.folder / "runs").glob(f"*/{METRICS_FILE}"))
        return read_metrics(files[-1]) if files else {}

    def row_times(self) -> dict[int, float]:
        """Return when the newest run wrote the row of each step [s since 1970]."""
        files = sorted((self.folder / "runs").glob(f"*/{METRICS_FILE}"))
        lines = files[-1].read_text().split("\n")[:-1] if files else []
        return {row["step"]: row["time"] for row in map(json.loads, lines)}


Found = Iterator[tuple[str, Figures]]
"""Names and figures of the lines that a case has; the name is appended to the case's."""


def speeds(metrics: dict[int, dict[str, float]], gpus: int, responses: int) -> Figures:
    """Return the medians of a GRPO run's steps, and the tokens that a GPU generates, trains on and handles each second.

    The first step is not counted; without a second one nothing is returned.
    """
    if sum(f"{PHASE}step" in row for row in metrics.values()) < 2:
        return {}
    found = medians(metrics)
    tokens = found["perf/tokens"], found["response_length/mean"] * responses
    for name, phase, count in (
        ("generation", "rollout", tokens[1]),
        ("update", "update_actor", tokens[0]),
        ("step", "step", tokens[0]),
    ):
        found[f"{name} tokens/s/GPU"] = count / found[f"{PHASE}{phase}"] / gpus
    return found


def grpo(job: Job, *keys: str) -> Found:
    """Steps by phase, with one vLLM for each GPU."""
    given = job.options
    try:
        job.finish(job.training(*keys))
    finally:  # also of the steps that a run did before it was cut off
        if found := speeds(job.metrics(), given.gpus, given.prompts * given.samples):
            yield "", found


def tensor_parallel(job: Job) -> Found:
    """The same with vLLMs that span as many GPUs as divide the attention heads."""
    together = math.gcd(job.options.gpus, SHAPES[job.options.shape]["num_attention_heads"])
    return grpo(job, f"{POLICY}.rollout.tensor_model_parallel_size={together}")


def lora(job: Job) -> Found:
    """The same with adapters of rank 32, frozen layers streamed from the host."""
    return grpo(job, *STREAMED)


def offload(job: Job) -> Found:
    """Checkpointing, boundary and attention beside FSDP2's all-gather: seconds, ratios and peaks."""
    given = job.options
    size = ("--gpus", str(given.gpus), "--model", given.shape, "--case", given.offload_case)
    ends = ("--rounds", str(given.rounds), "--seconds", "25", "--no-picture", "--out", str(job.folder))
    job.finish(job.program("benchmarks.offload", *size, *ends))
    for row in json.loads((job.folder / "results.json").read_text())["cases"][0]["rows"]:
        if row["median_s"] is not None:
            peak = {"peak GB": row["peak_bytes"] / GB} if row["peak_bytes"] else {}
            yield row["mode"], {"step s": row["median_s"], "x checkpointing": row["ratio_to_checkpointing"], **peak}


def one_step(job: Job, ulysses: int, tokens: int) -> Figures:
    """Return the figures of an optimizer step on sequences, each shared by so many GPUs, with fp32 masters."""
    given = job.options
    where = ("--shape", given.shape, "--gpus", str(given.gpus), "--ulysses", str(ulysses), "--out", str(job.folder))
    length = ("--tokens", str(tokens), "--first-tokens", str(min(tokens, 4096)), "--modes", "rlx")
    job.finish(job.program("benchmarks.optimizer_step", *where, *length, "--optimizer-state", given.optimizer_state))
    ((_, _, figures),) = json.loads((job.folder / "results.json").read_text())
    if "error" in figures:
        raise RuntimeError(figures["error"])
    memory = {"peak GB": max(figures["peaks"].values()) / GB, "host GB": figures["host_bytes"] / GB}
    return {"step s": figures["seconds"], "step tokens/s/GPU": tokens / ulysses / figures["seconds"], **memory}


def ulysses(job: Job) -> Found:
    """Optimizer steps on sequences of 131,072 tokens, each shared by 1, 2, 4 GPUs."""
    for count in (count for count in (1, 2, 4) if job.options.gpus % count == 0):
        yield f"{count}", one_step(job, count, job.options.ulysses_tokens)


def long(job: Job) -> Found:
    """One optimizer step on a single sequence of 900,000 tokens."""
    yield "", one_step(job, job.options.gpus, job.options.long_tokens)


def restart(job: Job) -> Found:
    """A run that saves, loses a worker and goes on: seconds to save, and from the kill to the next row."""
    size = {"prompts": 2 * job.options.gpus}
    keys = (f"trainer.total_training_steps={LAST_STEP}", f"trainer.save_freq={SAVED_STEP}")
    with running(job.training(*keys, **size), job.log) as process:
        while not (saved := [*(job.folder / "runs").glob(f"*/checkpoints/global_step_{SAVED_STEP}")]):
            if process.poll() is not None or job.left_s < 0:
                job.end_of(process.returncode or None)
            time.sleep(POLL_S)
        nbytes = sum(file.stat().st_size for file in saved[0].rglob("*") if file.is_file())
        workers = [each for each in psutil.Process(process.pid).children(recursive=True) if is_worker(each)]
        workers[-1].kill()
        killed = time.time()
        job.end_of(wait_at_most(process, job.left_s))
    row, times = job.metrics()[SAVED_STEP], [at for at in job.row_times().values() if at > killed]
    save_s, lost_s = row[f"{PHASE}checkpoint"], min(times) - killed
    yield "", {"save s": save_s, "save GB": nbytes / GB, "from kill to row s": lost_s, "load s": loaded_s(job)}


def resume(job: Job) -> Found:
    """That run goes on with half the GPUs: seconds from the command to the next row."""
    saved = next((job.folder / "runs").glob(f"*/checkpoints/global_step_{LAST_STEP}"), None)
    if saved is None or job.options.gpus < 2:
        raise RuntimeError("needs the checkpoint of the case restart, in the same --folder and with the same --gpus")
    keys = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}", "trainer.save_last=False"]
    began, last = time.time(), f"trainer.total_training_steps={LAST_STEP + 1}"
    job.finish(job.training(*keys, last, gpus=job.options.gpus // 2, prompts=2 * job.options.gpus))
    yield "", {"from command to row s": job.row_times()[LAST_STEP + 1] - began, "load s": loaded_s(job)}


def is_worker(process: psutil.Process) -> bool:
    """Whether a process hosts roles of a run."""
    try:
        return WORKER in " ".join(process.cmdline())
    except psutil.Error:
        return False


def loaded_s(job: Job) -> float:
    """Return the seconds in which the last resumed run of the log read its checkpoint."""
    return float(re.findall(r"^loaded in ([\d.]+) s", job.log.read_text(errors="replace"), re.MULTILINE)[-1])


CASES: dict[str, Callable[[Job], Found]] = {
    **{"grpo": grpo, "tensor-parallel": tensor_parallel, "lora": lora, "offload": offload},
    **{"ulysses": ulysses, "long": long, "restart": restart, "resume": resume},
}


def measure(name: str, options: Namespace, overrides: list[str], inputs: list[str]) -> Iterator[dict[str, Any]]:
    """Do a case and yield its lines for the file."""
    folder = options.folder / f"{options.shape}-{options.gpus}-{name.replace('resume', 'restart')}"
    if name != "resume":  # which continues the run of restart
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    about = {"shape": options.shape, "gpus": options.gpus, "machine": title(chosen_device()), "keys": overrides}
    try:
        for part, figures in CASES[name](Job(options, overrides, inputs, folder, began + options.limit)):
            yield {"case": f"{name} {part}".strip(), **about, "figures": figures}
        error = {}
    except (RuntimeError, OSError, LookupError) as fault:
        error = {"error": f"{type(fault).__name__}: {fault}", "log": str(folder)}
    yield {"case": name, **about, "seconds": time.monotonic() - began, **error}


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print a table for each shape and case, with a column for each number of GPUs; of a repeated case the last."""
    tables: dict[tuple[str, str], dict[int, Figures]] = {}
    for record in records:
        if "figures" in record:
            tables.setdefault((record["shape"], record["case"]), {})[record["gpus"]] = record["figures"]
        elif "error" in record:
            print(f"{record['shape']}, {record['case']}, {record['gpus']} GPUs: {record['error']}")
    for (shape, case), columns in tables.items():
        fewest = min(columns)
        for speed in (f"{name} tokens/s/GPU" for name in SPEEDS if len(columns) > 1):
            for figures in columns.values():
                if speed in figures and speed in columns[fewest]:
                    figures[f"{speed}, x {fewest} GPUs"] = figures[speed] / columns[fewest][speed]
        print(f"\n{f'{shape}, {case}':>36}" + "".join(f"{gpus:>9} GPUs" for gpus in sorted(columns)))
        for figure in {name: None for figures in columns.values() for name in figures}:
            cells = (columns[gpus].get(figure) for gpus in sorted(columns))
            text = "".join(f"{'-' if value is None else f'{value:.4g}':>14}" for value in cells)
            print(f"{figure.removeprefix(PHASE):>36}{text}")


def options_of(arguments: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    """Read the command line; return also the keys of runs."""
    cases = "\n".join(f"  {name:18}{(case.__doc__ or '').splitlines()[0]}" for name, case in CASES.items())
    parser = ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=f"{__doc__}\ncases:\n{cases}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE")
    add_work(parser)
    parser.set_defaults(prompts=None, prompt=256, response=1024, micro_batch=16, steps=3)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--mean-response", type=int, default=0, help="lengths vary up to --response, with this mean")
    parser.add_argument("--limit", type=float, default=540, help="most seconds of a case (default 540)")
    parser.add_argument("--rounds", type=int, default=8, help="of offload's steps (default 8)")
    parser.add_argument("--offload-case", default="8192", help="tokens, or TOKENSxLAYERS (default 8192)")
    parser.add_argument("--ulysses-tokens", type=int, default=131_073)
    parser.add_argument("--long-tokens", type=int, default=900_097)
    parser.add_argument("--optimizer-state", default="device", help="of ulysses and long (default device)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rlx_scaling"), help="for weights, runs and output")
    parser.add_argument("--json", type=Path, default=Path("scaling.jsonl"), help="default scaling.jsonl")
    given, others = parser.parse_known_args(arguments)
    overrides = [*others, *(case for case in given.cases if "=" in case)]
    given.cases = [case for case in given.cases if "=" not in case]
    if unknown := [*(set(given.cases) - set(CASES)), *(key for key in others if "=" not in key or key.startswith("-"))]:
        parser.error(f"got {', '.join(unknown)}, expected some of {', '.join(CASES)}, options above and key=value")
    given.folder, given.prompts = given.folder.absolute(), given.prompts or 32 * given.gpus
    return given, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a case failed or was cut off."""
    options, overrides = options_of(arguments)
    made = options.folder / f"{options.shape}-{options.prompt}-{options.response}-{options.mean_response}"
    rows = Namespace(**{**vars(options), "prompts": ROWS, "steps": 1})
    inputs, failed = list[str](), False
    for name in options.cases:
        if name not in ("offload", "ulysses", "long") and not inputs:
            if not (made / "inputs.json").exists():
                made.mkdir(parents=True, exist_ok=True)
                (made / "inputs.json").write_text(
                    json.dumps(write_inputs(made, rows, chosen_device(), options.mean_response))
                )
            inputs = json.loads((made / "inputs.json").read_text())
        for record in measure(name, options, overrides, inputs):
            failed |= "error" in record
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
            if "error" in record:
                log = Path(record["log"]) / "output.log"
                print(log.read_text(errors="replace")[-6000:] if log.exists() else "", flush=True)
    if options.json.exists():
        show([json.loads(line) for line in options.json.read_text().splitlines()])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
