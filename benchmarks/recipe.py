"""Run some steps of a recipe of configs/experiment with random weights, and print seconds and peaks beside the forecast.

    python -m benchmarks.recipe qwen3_8b_lora_1x80gb [--prompts 16] [--steps 3] [--limit 540] [key=value ...]

The model has the shape of the recipe's. Prompts and responses have the recipe's full lengths, as the forecast assumes; a step has
`--prompts` prompts in place of the recipe's, with as many updates, which changes no peak of a micro-batch. `--shape`,
`--prompt` and `--response` replace the recipe's for a machine that is smaller. Seconds are medians over all steps but the first; those
predicted are of `rlx plan`, for forward and backward of an update. Measured GB are the most memory in use on a device, by torch's
count inside a phase and the driver's around it; on a CPU the resident memory after a phase.
"""

import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import GB, benchmark_parser, cell, chosen_device, running, title, wait_at_most, write_json
from benchmarks.race.inputs import PHASE, medians, write_inputs
from rlx.config.compose.command_line import compose
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import inspect_machine, named_machine, processes
from rlx.config.schema import PPOConfig
from rlx.offload.plan.run_memory import PLANNED_MODES, Scenario
from rlx.offload.plan.shapes import SHAPES, shape_named
from rlx.trainer.tracking import METRICS_FILE, read_metrics

Figures = dict[str, float | None]
ACTOR = "actor_rollout_ref.actor"
COLUMNS = ("seconds", "predicted s", "measured GB", "predicted GB", "of GB")


def keys_of(options: Namespace, recipe: PPOConfig) -> list[str]:
    """Return the keys that replace those of the recipe."""
    updates = recipe.data.train_batch_size // recipe.actor_rollout_ref.actor.ppo_mini_batch_size
    return [
        f"data.train_batch_size={options.prompts}",
        f"{ACTOR}.ppo_mini_batch_size={max(1, options.prompts // updates)}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.response}",
        f"trainer.total_training_steps={options.steps}",
        *(f"trainer.{name}=False" for name in ("val_before_train", "save_last")),
        *(f"trainer.{name}=-1" for name in ("test_freq", "save_freq")),
    ]


def update_s(forecast: MemoryForecast, tokens: float) -> float | None:
    """Return the seconds that a plan predicts for forward and backward of an update of so many tokens on each GPU."""
    own, micro = forecast.run.models["actor"], forecast.roles["actor"].micro
    if forecast.machine.hardware is None or own.mode not in PLANNED_MODES or not tokens:
        return None
    at_once = int(min(tokens, micro.tokens or (micro.rows or 1) * forecast.length))
    scenario = Scenario(own, forecast.machine.hardware, max(1, at_once // forecast.length))
    return tokens / at_once * scenario.plan(own.mode, at_once).prediction.step_s


def in_use(metrics: Mapping[str, float], phase: str) -> float | None:
    """Return the most memory in use in a phase [10^9 bytes]; None if it was not recorded."""
    before, after, torchs, peak = (
        metrics.get(f"memory/{phase}_{name}_gb") for name in ("before", "after", "before_allocated", "peak_allocated")
    )
    if before is None or after is None:
        return None
    if torchs is None or peak is None:
        return after
    return max(before, after, before - torchs + peak)


def table(forecast: MemoryForecast, steps: Mapping[int, Mapping[str, float]]) -> dict[str, Figures]:
    """Return the figures of each phase, those predicted and, after a second step, those measured."""
    seconds = medians(steps) if len(steps) > 1 else {}
    largest = {name: max(row.get(name, 0.0) for row in steps.values()) for row in steps.values() for name in row}
    tokens = seconds.get("perf/tokens", 0.0) * (1 - seconds.get("actor/tokens_saved", 0.0))
    predicted = {phase.name: phase for phase in forecast.phases()}
    names = [
        *predicted,
        *(n for n in (k.removeprefix(PHASE) for k in seconds if k.startswith(PHASE)) if n not in predicted),
    ]
    found = {}
    for name in names:
        phase = predicted.get(name)
        planned = update_s(forecast, tokens / processes(forecast.config)) if name == "update_actor" else None
        limits = (None, None) if phase is None else (phase.peak / GB, None if phase.limit is None else phase.limit / GB)
        values = (seconds.get(f"{PHASE}{name}"), planned, in_use(largest, name), *limits)
        found[name] = dict(zip(COLUMNS, values, strict=True))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if the run failed or was cut off before its second step ended."""
    parser = benchmark_parser("recipe", __doc__ or "")
    parser.add_argument("recipe", help="name of a file of configs/experiment")
    parser.add_argument("--prompts", type=int, help="of a step (default: the recipe's)")
    parser.add_argument("--steps", type=int, default=3, help="at least 2 (default 3)")
    parser.add_argument("--limit", type=float, default=540, help="most seconds of the run (default 540)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: that of the recipe's model")
    parser.add_argument("--prompt", type=int, help="tokens (default: the recipe's)")
    parser.add_argument("--response", type=int, help="tokens (default: the recipe's)")
    parser.add_argument("--on", help="machine to predict for, such as 1xh100 (default: this one)")
    parser.add_argument("--log", type=Path, help="file for the run's output")
    options, overrides = parser.parse_known_args(arguments)
    experiment = f"experiment={options.recipe}"
    recipe = compose([experiment]).partial
    options.shape = options.shape or shape_named(recipe.actor_rollout_ref.model.path or "")
    if options.shape is None or options.steps < 2:
        parser.error(
            f"got {options.recipe} --steps {options.steps}, expected a model of known shape and at least 2 steps"
        )
    options.prompts = options.prompts or recipe.data.train_batch_size
    options.prompt = options.prompt or recipe.data.max_prompt_length
    options.response = options.response or recipe.data.max_response_length
    device = chosen_device(options.device)
    with tempfile.TemporaryDirectory(prefix="rlx-recipe-") as made:
        folder, log = Path(made), options.log or Path(made) / "output.log"
        keys = [experiment, *keys_of(options, recipe), *write_inputs(folder, options, device), *overrides]
        machine = named_machine(options.on) if options.on else inspect_machine()
        config = compose(keys).config
        forecast = MemoryForecast.of(config, machine)
        command = [sys.executable, "-m", "rlx.main_ppo", *keys, "trainer.logger=[console,jsonl]"]
        began = time.perf_counter()
        with running([*command, f"trainer.default_local_dir={folder / 'runs'}"], log) as process:
            code = wait_at_most(process, options.limit)
        run = next(folder.rglob(METRICS_FILE), None)
        steps = {} if run is None else {n: row for n, row in read_metrics(run).items() if f"{PHASE}step" in row}
        if code != 0:
            print(f"exit code {code}; the output ends in:\n{log.read_text(errors='replace')[-6000:]}")
    found = table(forecast.decided(), steps)
    size = f"{options.prompts} prompts of {options.prompt} tokens, {config.actor_rollout_ref.rollout.n} responses of {options.response} to each"
    print(
        f"{options.recipe}: {options.shape}, {size}; {title(device)}; {len(steps)} steps, {time.perf_counter() - began:.0f} s"
    )
    print(f"{'':>16}" + "".join(f"{column:>14}" for column in COLUMNS))
    for phase, figures in found.items():
        print(f"{phase:>16}" + "".join(cell(figures[column], 2, 14) for column in COLUMNS))
    each = [round(row[f"{PHASE}step"], 2) for row in steps.values()]
    print(json.dumps({"seconds of the steps": each, "exit code": code}))
    write_json(
        options, device, {"recipe": options.recipe, "size": size, "keys": overrides, "steps": each, "phases": found}
    )
    return int(len(steps) < 2)


if __name__ == "__main__":
    sys.exit(main())
