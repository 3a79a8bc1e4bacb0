"""Measure the same GRPO steps by rlx, verl and TRL on one GPU, phase by phase.

python -m benchmarks.race [--site verl=FOLDER] [key=value ...]

Each framework runs in a process of its own, one after the other, from its published package; those that are not installed are
named. `--site` is a folder of packages that TRL or verl finds first, since verl 0.9.1 needs older ones. Equal are model (random weights),
prompts and their order, lengths, micro-batches, optimizer steps, clip range, KL to a reference, AdamW, fp32 weights with bf16
compute, vLLM's share of memory and its CUDA graphs. The table has medians over all steps but the first. Further keys go to rlx
alone; `--each KEY=VALUE,VALUE` lets it run with each value. A framework that takes longer than `--limit` is ended, and the steps it
did count: `steps` is the number of those in the medians.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import cell, chosen_device, running, title, wait_at_most, write_json
from benchmarks.race.inputs import PHASE, add_work, settings, write_inputs
from rlx.trainer.tracking import METRICS_FILE, read_metrics

Steps = dict[int, dict[str, float]]
FRAMEWORKS = ("rlx", "TRL", "verl")
KERNELS = Path(__file__).with_name("kernels")  # flash-attn's compiled part, by torch's kernels
ROOT = Path(__file__).parents[2]
COLUMNS = {  # of the table, and the names that frameworks have for them
    "generation": ("rollout", "gen"),
    "old": ("old_log_prob",),
    "ref": ("ref",),
    "update": ("update_actor",),
    "sync": ("sync", "update_weights"),
    "step": ("step",),
}
VERL_LORA = [  # how verl 0.9.1 trains adapters beside vLLM 0.26; two other ways failed at the first weight update
    "actor_rollout_ref.rollout.load_format=safetensors",  # vLLM loads the base weights itself
    "actor_rollout_ref.actor.strategy=fsdp2",  # with FSDP1 vLLM gets an adapter without weights
    "actor_rollout_ref.ref.strategy=fsdp2",
]
CHECKS = {"tokens": "response_length/mean", "grad norm": "actor/grad_norm", "saved": "actor/tokens_saved"}
"""Figures that show that all do the same work, and the share of tokens that only rlx saves."""


class Racer(NamedTuple):
    """A framework's run: its own folder, its command, the environment it needs, and the reader of the steps that it has done."""

    name: str
    folder: Path
    command: list[str]
    environment: dict[str, str]
    steps: Callable[[], Steps]


def shared_keys(options: Namespace) -> list[str]:
    """Return the keys that rlx and verl have alike; TRL's names of them are in `benchmarks.race.trl`."""
    policy, lora = "actor_rollout_ref", options.lora
    return [
        *settings(options),
        "data.shuffle=False",
        f"{policy}.model.enable_gradient_checkpointing={options.checkpointing}",
        f"{policy}.actor.optim.lr={options.lr}",
        f"{policy}.rollout.name=vllm",
        f"{policy}.rollout.tensor_model_parallel_size=1",
        f"{policy}.rollout.gpu_memory_utilization={options.share}",
        f"{policy}.rollout.max_num_batched_tokens=4096",  # fixed in TRL's code
        *((f"{policy}.model.lora_rank={lora}", f"{policy}.model.lora_alpha={lora}") if lora else ()),
    ]


def rlx_racer(name: str, folder: Path, keys: list[str]) -> Racer:
    """Return rlx's run."""
    own = ["trainer.logger=[console,jsonl]", f"trainer.default_local_dir={folder}"]

    def steps() -> Steps:
        found = next(folder.rglob(METRICS_FILE), None)
        return read_metrics(found) if found else {}

    return Racer(name, folder, [sys.executable, "-m", "rlx.main_ppo", *keys, *own], python_path(ROOT), steps)


def trl_racer(folder: Path, options: Namespace) -> Racer:
    """Return TRL's run."""
    plain = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str)}
    command = [sys.executable, "-m", "benchmarks.race.trl", str(folder), json.dumps(plain)]
    rows = folder / "rows.jsonl"
    return Racer(
        "TRL",
        folder,
        command,
        python_path(*sites(options, "TRL"), ROOT, *kernels()),
        lambda: read_metrics(rows) if rows.exists() else {},
    )


def verl_racer(folder: Path, options: Namespace, keys: list[str]) -> Racer:
    """Return verl's run."""
    rows = folder / "rows.jsonl"
    # Its name of the group
    keys = [f"reward.{key}" if key.startswith("custom_reward_function") else key for key in keys]
    own = [
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        *(VERL_LORA if options.lora else []),
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder}",
    ]

    def steps() -> Steps:
        lines = rows.read_text().splitlines() if rows.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return {row["step"]: row["data"] for row in found if f"{PHASE}step" in row["data"]}

    environment = python_path(*sites(options, "verl"), *kernels()) | {"VERL_FILE_LOGGER_PATH": str(rows)}
    return Racer("verl", folder, [sys.executable, "-m", "verl.trainer.main_ppo", *keys, *own], environment, steps)


def sites(options: Namespace, name: str) -> list[Path]:
    """Return the folders of `--site` for a framework."""
    return [Path(folder).resolve() for given, _, folder in (x.partition("=") for x in options.site) if given == name]


def kernels() -> list[Path]:
    """Return the folder that takes the place of flash-attn's compiled part, unless that is installed."""
    return [] if find_spec("flash_attn_2_cuda") else [KERNELS]


def python_path(*first: Path) -> dict[str, str]:
    """Return PYTHONPATH with some folders first."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextlib.contextmanager
def polled_memory() -> Iterator[list[float]]:
    """Fill a list with the device's memory in use [GB], five times a second; leave it empty without nvidia-smi."""
    found: list[float] = []
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=200"]
    try:
        poll = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield found
        return
    try:
        yield found
    finally:
        poll.terminate()
        found += [int(line) * 2**20 / 1e9 for line in poll.communicate()[0].splitlines() if line.strip().isdigit()]


def racers(folder: Path, options: Namespace, keys: list[str], overrides: list[str]) -> Iterator[Racer]:
    """Yield the runs, and print the names of frameworks that are not installed."""
    key, _, values = (options.each or "").partition("=")
    for name in options.frameworks:
        package = name.lower()
        if not find_spec(package) and not any((site / package).is_dir() for site in sites(options, name)):
            print(f"{name} is not installed", flush=True)
        elif name == "rlx":
            for value in values.split(","):
                own = [*keys, *overrides, *([f"{key}={value}"] if key else [])]
                yield rlx_racer(f"rlx {value}".strip(), folder / f"rlx{value}", own)
        else:
            yield trl_racer(folder / "trl", options) if name == "TRL" else verl_racer(folder / "verl", options, keys)


def run(racer: Racer, limit: float) -> tuple[Steps, float | None]:
    """Do a run of at most `limit` seconds; return its steps and the most memory of the device [GB]."""
    racer.folder.mkdir()
    began, log = time.perf_counter(), racer.folder / "log.txt"
    with polled_memory() as memory, running(racer.command, log, env=racer.environment, cwd=racer.folder) as process:
        wait_at_most(process, limit)
    steps = racer.steps()
    seconds = [round(row[f"{PHASE}step"], 1) for row in steps.values()]
    print(
        f"{racer.name}: exit code {process.returncode}, {time.perf_counter() - began:.0f} s, steps {seconds}",
        flush=True,
    )
    if process.returncode or not steps:
        print(f"--- end of its log\n{log.read_text(errors='replace')[-6000:]}\n---", flush=True)
    return steps, max(memory, default=None)


def work_of(options: Namespace) -> str:
    """Return what a step does, in words."""
    responses = f"{options.prompts} x {options.samples} responses of {options.response} tokens"
    trained = f"adapters of rank {options.lora}" if options.lora else "all weights"
    return (
        f"{options.shape}, {responses}, prompts of {options.prompt}, {options.updates} updates of {trained}, {options.micro_batch} "
        "responses in a micro-batch"
    )


def figures(steps: Steps, memory: float | None) -> dict[str, float | None]:
    """Return the medians over all steps but the first, the seconds of no phase as `rest`, vLLM's engines, and the peak of memory."""
    rows = [steps[step] for step in sorted(steps)][1:]
    found: dict[str, float | None] = {"steps": len(rows)}
    for column, names in COLUMNS.items():
        every = [sum(row.get(f"{PHASE}{name}", 0.0) for name in names) for row in rows]
        found[column] = statistics.median(every)
    phases = [found[column] or 0.0 for column in COLUMNS if column != "step"]
    found["rest"] = (found["step"] or 0.0) - sum(phases)
    found |= {column: rows[0].get(name) for column, name in CHECKS.items()}
    return found | {"engines": rows[0].get("perf/rollout/engines", 1.0), "peak GB": memory}


def show(table: Mapping[str, Mapping[str, float | None]]) -> None:
    """Print a row for each framework: the seconds of its phases, and its step beside that of the first row."""
    columns = [*(c for c in COLUMNS if c != "step"), "rest", "step", "steps", "engines", "peak GB", *CHECKS]
    width = max(map(len, table))
    print(" " * width + "".join(f"{c:>11}" for c in columns) + f"{'x ' + next(iter(table)):>11}")
    first = next(iter(table.values()))["step"] or 1.0
    for name, row in table.items():
        cells = [row[column] for column in columns] + [(row["step"] or 0.0) / first]
        print(f"{name:>{width}}" + "".join(cell(value, 2, 11) for value in cells), flush=True)


def site(text: str) -> str:
    """Return an argument of `--site` if it is one."""
    name, _, folder = text.partition("=")
    if name not in FRAMEWORKS[1:] or not Path(folder).is_dir():
        raise ArgumentTypeError(f"got {text}, expected TRL=FOLDER or verl=FOLDER with a folder that exists")
    return text


def add_frameworks(parser: ArgumentParser) -> None:
    """Add the options that say who runs, and for how long."""
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    sites = {"action": "append", "default": [], "metavar": "NAME=FOLDER", "help": "packages that it finds first"}
    parser.add_argument("--site", type=site, **sites)
    parser.add_argument("--share", type=float, default=0.4, help="of device memory for vLLM (default 0.4)")
    parser.add_argument("--limit", type=float, default=600, help="most seconds of a run (default %(default)s)")


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = ArgumentParser(prog="python -m benchmarks.race", description=__doc__)
    add_work(parser)
    add_frameworks(parser)
    parser.set_defaults(prompts=64, prompt=256, updates=2, micro_batch=16)
    parser.add_argument("--each", metavar="KEY=VALUE,VALUE", help="rlx runs with each value of this key")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters on all linear layers; 0: train all weights"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    options, overrides = parser.parse_known_args(arguments)
    if options.steps < 2:
        parser.error(f"got --steps {options.steps}, expected at least 2: the first is left out")
    device, table = chosen_device(), {}
    with tempfile.TemporaryDirectory(prefix="rlx-race-") as made:
        folder = Path(made)
        keys = [*shared_keys(options), *write_inputs(folder, options, device)]
        print(f"{title(device)}, {work_of(options)}", flush=True)
        for racer in racers(folder, options, keys, overrides):
            steps, memory = run(racer, options.limit)
            if len(steps) > 1:
                table[racer.name] = figures(steps, memory)
                show(table)  # each time, since a later framework may take the rest of the machine's time
    write_json(options, device, {"work": work_of(options), "keys": overrides, "frameworks": table})


if __name__ == "__main__":
    main()
