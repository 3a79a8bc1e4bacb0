"""Measure the seconds of a GRPO step by phase, with each of several values of a key: whole runs on a model of random weights.

python -m benchmarks.grpo_step --each actor_rollout_ref.model.use_shared_prefix=False,True [key=value ...]

Model and prompts are made on the spot. Each value of the key gets a run of `--steps` steps in a process of its own, one after
the other. All responses have `--response` tokens. The table shows the median over all steps
but the first of each phase, and of other figures of a run. Further overrides hold for every run.
"""

import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import benchmark_parser, cell, chosen_device, title, write_json
from benchmarks.race.inputs import write_inputs
from rlx.offload.plan.shapes import SHAPES
from rlx.trainer.tracking import METRICS_FILE, read_metrics

PHASE = "timing_s/"
OTHERS = ("actor/tokens_saved", "actor/grad_norm", "response_length/mean", "perf/peak_memory_gb")


def settings(options: Namespace) -> list[str]:
    """Return the overrides of every run but those of its inputs. verl knows them too."""
    tokens = options.micro_batch * (options.prompt + options.response)
    policy = "actor_rollout_ref"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.response}",
        f"{policy}.rollout.n={options.samples}",
        f"{policy}.rollout.max_num_seqs={options.prompts * options.samples}",
        f"{policy}.actor.ppo_mini_batch_size={options.prompts // options.updates}",
        f"{policy}.actor.use_dynamic_bsz=True",
        f"{policy}.actor.ppo_max_token_len_per_gpu={tokens}",
        f"{policy}.actor.use_kl_loss=True",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]


def add_work(parser: ArgumentParser) -> None:
    """Add the options that say how much work a step is."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-0.5b")
    for name, default, meaning in (
        ("--prompts", 8, "of a step"),
        ("--samples", 8, "responses to a prompt"),
        ("--prompt", 4096, "tokens of a prompt"),
        ("--response", 512, "tokens of a response"),
        ("--updates", 1, "optimizer steps of a step"),
        ("--micro-batch", 8, "responses of a forward"),
        ("--steps", 4, "of each run, at least 2"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default %(default)s)")


def run(folder: Path, overrides: Sequence[str]) -> dict[int, dict[str, float]]:
    """Do one run and return its metrics by step. Raises RuntimeError if it fails."""
    command = [
        sys.executable,
        "-m",
        "rlx.main_ppo",
        *overrides,
        "trainer.logger=[console,jsonl]",
        f"trainer.default_local_dir={folder}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    made = next(folder.rglob(METRICS_FILE), None)
    if done.returncode or made is None:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout[-8000:]}")
    return read_metrics(made)


def medians(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each phase and of `OTHERS` over all steps but the first, which compiles and plans."""
    steps = [metrics[step] for step in sorted(metrics) if f"{PHASE}step" in metrics[step]][1:]
    names = {name for step in steps for name in step if name.startswith(PHASE) or name in OTHERS}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in sorted(names)}


def show(found: Mapping[str, Mapping[str, float]]) -> None:
    """Print a row for each phase and a column for each value, the phases by their seconds, then the step and the others."""
    print(f"{'median of a step':>26}" + "".join(f"{value:>14}" for value in found))
    last = {f"{PHASE}step": 1, **dict.fromkeys(OTHERS, 2)}
    names = {name: figures[name] for figures in reversed(found.values()) for name in figures}
    for name in sorted(names, key=lambda name: (last.get(name, 0), -names[name])):
        print(f"{name.removeprefix(PHASE):>26}" + "".join(cell(figures.get(name), 3, 14) for figures in found.values()))


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = benchmark_parser("grpo_step", __doc__)
    parser.add_argument("--each", required=True, metavar="KEY=VALUE,VALUE", help="the key, and its value in each run")
    add_work(parser)
    options, overrides = parser.parse_known_args(arguments)
    key, _, values = options.each.partition("=")
    if not values or options.steps < 2:
        got = f"--each {options.each} --steps {options.steps}"
        parser.error(f"got {got}, expected KEY=VALUE,VALUE and at least 2 steps")
    device, found = chosen_device(options.device), {}
    with tempfile.TemporaryDirectory(prefix="rlx-grpo-step-") as made:
        folder = Path(made)
        inputs = write_inputs(folder, options, device)
        work = f"{options.prompts} prompts of {options.prompt} tokens, {options.samples} responses of {options.response} to each"
        print(f"{title(device)}, {options.shape}, {work}", flush=True)
        for value in values.split(","):
            every = run(folder / f"run-{value}", [*settings(options), *inputs, *overrides, f"{key}={value}"])
            found[value] = medians(every)
            seconds = [round(x[f"{PHASE}step"], 2) for x in every.values()]
            print(f"{key}={value}: seconds of the steps {seconds}", flush=True)
    show(found)
    write_json(options, device, {"each": options.each, "medians": found})


if __name__ == "__main__":
    main()
