"""Let rlx, TRL and verl train the same real model on the same real task: reward over wall time from the start of the process.

python -m benchmarks.race.real --model smollm2 [--site verl=FOLDER] [--limit 170] [key=value ...]

The task is `sums` of docs/real_model.md. Equal are the weights, the prompts and their order, lengths, batches, optimizer steps, learning
rate, AdamW and clip range; there is no KL. Each framework has `--limit` seconds in a process of its own, one after the other. Further keys
go to rlx alone, `--site` is that of `benchmarks.race`. OUT/race.json and OUT/race.png hold the curves, also those of earlier calls.

A level is reached when the mean reward of AVERAGED steps in a row is as high. The area is the mean reward over the longest limit: 0 before
the first step ends, and the last reward after a shorter limit.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shutil import copyfile, rmtree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.common import chosen_device, running, title, write_json
from benchmarks.race.__main__ import FRAMEWORKS, Racer, add_frameworks, racers, shared_keys
from benchmarks.race.inputs import add_work
from benchmarks.real_model import EXAMPLE, write_data
from rlx.trainer.report import BLUE, GREEN, GREY, INK, ORANGE
from rlx.trainer.report import style as style_axes

REWARDS = ("reward/mean", "critic/score/mean")  # rlx's and TRL's name, verl's
LEVELS = (0.2, 0.4, 0.6)
AVERAGED = 3  # steps of which a level is a mean
LOOK_S = 0.2
COLORS = dict(zip(FRAMEWORKS, (BLUE, ORANGE, GREEN), strict=True))

Curve = list[tuple[float, float]]
"""Seconds from the start of the process to the end of each step, and the step's mean reward."""


def write_inputs(folder: Path, model: Path) -> list[str]:
    """Write rows and reward in the form that all take, and return rlx's and verl's keys that name them."""
    rows, _ = write_data("sums", folder, None)
    with (folder / "prompts.jsonl").open("w") as file:
        for row in map(json.loads, rows.read_text().splitlines()):
            prompt = [{"role": "user", "content": row["prompt"]}]
            truth = {"style": "rule", "ground_truth": row["answer"]}
            file.write(json.dumps({"prompt": prompt, "data_source": "sums", "reward_model": truth}) + "\n")
    copyfile(EXAMPLE / "reward.py", folder / "reward.py")
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(model)
    data = [f"data.{name}_files={folder / 'prompts.jsonl'}" for name in ("train", "val")]
    reward = [f"custom_reward_function.path={folder / 'reward.py'}", "custom_reward_function.name=compute_score"]
    return [f"actor_rollout_ref.model.path={folder / 'model'}", *data, *reward]


def run(racer: Racer, limit: float, console: Console) -> Curve:
    """Let a framework train for so many seconds."""
    rmtree(racer.folder, ignore_errors=True)
    racer.folder.mkdir()
    began, log, found = time.perf_counter(), racer.folder / "log.txt", dict[int, tuple[float, float]]()
    with running(racer.command, log, env=racer.environment, cwd=racer.folder) as process:
        while time.perf_counter() < began + limit:
            has_ended, now = process.poll() is not None, time.perf_counter() - began
            for step, row in racer.steps().items():
                reward = next((row[name] for name in REWARDS if name in row), None)
                if reward is not None:
                    found.setdefault(step, (now, reward))
            if has_ended:
                break
            time.sleep(LOOK_S)
    if process.returncode and not found:
        console.print(f"{racer.name} ended with exit code {process.returncode}; its log ends in:", markup=False)
        console.print(log.read_text(errors="replace")[-6000:], markup=False)
    return [found[step] for step in sorted(found)]


def smoothed(curve: Curve) -> Curve:
    """Return the mean rewards of up to AVERAGED steps, at the end of the last."""
    lasts = [curve[max(0, end - AVERAGED) : end] for end in range(1, len(curve) + 1)]
    return [(last[-1][0], sum(reward for _, reward in last) / len(last)) for last in lasts]


def reached(curve: Curve, level: float) -> float | None:
    """Return the seconds after which the mean of AVERAGED steps is a level; None if it never is."""
    return next((seconds for seconds, reward in smoothed(curve)[AVERAGED - 1 :] if reward >= level), None)


def area(curve: Curve, limit: float) -> float:
    """Return the mean reward over the whole time."""
    steps = [*curve, (max(limit, curve[-1][0]), 0.0)] if curve else []
    return sum(reward * (until - since) for (since, reward), (until, _) in pairwise(steps)) / limit


def figures(curve: Curve, limit: float) -> dict[str, float | None]:
    """Return a row of the table."""
    levels = {f"s to {level:.0%}": reached(curve, level) for level in LEVELS}
    first = curve[0][0] if curve else None
    pace = (curve[-1][0] - curve[0][0]) / (len(curve) - 1) if len(curve) > 1 else None
    return {"first step ends, s": first, "s a step": pace, "steps": len(curve), **levels, "area": area(curve, limit)}


def show(rows: Mapping[str, Mapping[str, float | None]], console: Console) -> None:
    """Print a row for each framework."""
    table = Table("", *next(iter(rows.values())))
    for name, row in rows.items():
        table.add_row(name, *("-" if value is None else f"{value:.4g}" for value in row.values()))
    console.print(table)


def draw(curves: Mapping[str, Curve], heading: str, picture: Path) -> None:
    """Draw the rewards over the seconds since the start of each process."""
    figure = Figure(figsize=(8, 4.5), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style_axes(axes)
    for name, curve in curves.items():
        color = COLORS[name.split()[0]]
        axes.plot(*zip(*curve, strict=True), color=color, linewidth=0.8, alpha=0.35)
        axes.plot(*zip(*smoothed(curve), strict=True), color=color, linewidth=1.8, label=name)
    for level in LEVELS:
        axes.axhline(level, color=GREY, linewidth=0.6, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the start of the process", color=GREY, fontsize=9)
    axes.set_ylabel(f"reward; thick: mean of {AVERAGED} steps", color=GREY, fontsize=9)
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=GREY)
    figure.suptitle(heading, fontsize=11, color=INK)
    figure.savefig(picture, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = ArgumentParser(prog="python -m benchmarks.race.real", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder that examples/real_model/get_model.py wrote")
    parser.add_argument("--out", type=Path, default=Path("outputs/race"), help="default outputs/race")
    add_work(parser)
    add_frameworks(parser)
    sizes = {"prompts": 128, "prompt": 96, "response": 16, "updates": 2, "micro_batch": 256, "steps": 1000}
    parser.set_defaults(**sizes, lr=2e-5, kl=0.0, limit=170.0, each=None, lora=0, checkpointing=False)
    options, overrides = parser.parse_known_args(arguments)
    console, folder, device = Console(width=160, highlight=False), options.out.absolute(), chosen_device()
    folder.mkdir(parents=True, exist_ok=True)
    heading = f"{title(device)}: sums, {options.prompts} x {options.samples} responses a step, lr {options.lr:g}"
    console.print(heading)
    keys = [*shared_keys(options), *write_inputs(folder, options.model.absolute())]
    options.json = options.json or folder / "race.json"
    before = json.loads(options.json.read_text()) if options.json.exists() else {}
    if before and before["work"] != heading:
        parser.error(f"{options.json} is of other work, {before['work']}: give another --out")
    curves, limits = before.get("curves", {}), before.get("limits_s", {})
    for racer in racers(folder, options, keys, overrides):
        if curve := run(racer, options.limit, console):
            curves[racer.name], limits[racer.name] = curve, options.limit
            rows = {name: figures(found, max(limits.values())) for name, found in curves.items()}
            show(rows, console)
            draw(curves, heading, folder / "race.png")
            write_json(options, device, {"work": heading, "limits_s": limits, "table": rows, "curves": curves})


if __name__ == "__main__":
    main()
