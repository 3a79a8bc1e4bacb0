"""Train the tiny model by several algorithms, at several difficulties and seeds, and draw the learning curves.

`python -m benchmarks.learning --out FOLDER [key=value ...]`; runs that have finished in the folder are not repeated.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table

from rlx.trainer.report import BLUE, GREEN, GREY, INK, ORANGE, RED
from rlx.trainer.report import style as style_axes
from rlx.trainer.tracking import METRICS_FILE, read_metrics

ESTIMATOR = "algorithm.adv_estimator"
RECIPES: dict[str, tuple[str, ...]] = {
    "GRPO": (f"{ESTIMATOR}=grpo",),
    "Dr.GRPO": (
        f"{ESTIMATOR}=grpo",
        "algorithm.norm_adv_by_std_in_grpo=False",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    "RLOO": (f"{ESTIMATOR}=rloo",),
    "REINFORCE++": (f"{ESTIMATOR}=reinforce_plus_plus",),
    "PPO": (f"{ESTIMATOR}=gae",),
}
PLAIN = "GRPO without offload"
"""GRPO without offloading; its curve must equal GRPO's to the last digit."""
COLORS = dict(zip(RECIPES, (BLUE, ORANGE, GREEN, RED, "#6d3fb0"), strict=True))
# Settings with which the warm start gives a tiny model enough skill to learn from.
DIFFICULTIES: dict[int, tuple[str, ...]] = {
    1: (),
    2: ("data.arithmetic.train_size=20000", "warm_start.target_accuracy=0.3", "warm_start.max_steps=6000"),
}
DIFFICULTIES[3] = (*DIFFICULTIES[2], "warm_start.lr=2e-3")


class Curve(NamedTuple):
    """One run: greedy held-out accuracy by step, and the sampled reward of each step."""

    accuracy: dict[int, float]
    reward: dict[int, float]


Curves = Mapping[tuple[int, str], Sequence[Curve]]


def train(folder: Path, overrides: Sequence[str]) -> None:
    """Do one run in a process of its own, unless it has finished before. Raises RuntimeError if it fails."""
    if (folder / METRICS_FILE).exists():  # copied last
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "rlx.main_ppo", *overrides]
    with (folder / "output.log").open("w") as output:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
    made = next(folder.glob(f"runs/*/{METRICS_FILE}"), None)
    if done.returncode or made is None:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit code {done.returncode}; see {folder / 'output.log'}, which ends in:\n"
            + "\n".join((folder / "output.log").read_text().splitlines()[-10:])
        )
    with suppress(FileNotFoundError):  # not every run can draw it
        shutil.copy(made.with_name("report.png"), folder / "report.png")
    shutil.copy(made, folder / METRICS_FILE)


def read(folder: Path) -> Curve:
    """Return the curve of a finished run."""
    metrics = read_metrics(folder / METRICS_FILE)

    def series(name: str) -> dict[int, float]:
        return {step: row[name] for step, row in metrics.items() if name in row}

    return Curve(series("val/accuracy"), series("reward/mean"))


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation of accuracies, in per cent."""
    return f"{mean(values):.1%}" + (f" ± {100 * stdev(values):.1f}" if len(values) > 1 else "")


def table(curves: Curves) -> Table:
    """Return a table of accuracy before and after, by difficulty and recipe."""
    seeds = max(len(runs) for runs in curves.values())
    title = f"greedy held-out accuracy, mean ± standard deviation of {seeds} seeds"
    found = Table("difficulty", "algorithm", "before", "after", "gain", "each", title=title)
    for (difficulty, recipe), runs in curves.items():
        first, last = ([ends[end] for run in runs if (ends := list(run.accuracy.values()))] for end in (0, -1))
        gain = f"{100 * (mean(last) - mean(first)):+.1f}"
        each = ", ".join(f"{value:.1%}" for value in last)
        found.add_row(str(difficulty), recipe, f"{mean(first):.1%}", spread(last), gain, each)
    return found


def draw(curves: Curves, picture: Path) -> None:
    """Draw accuracy over the steps: per recipe the mean of its seeds, in a band from the lowest to the highest."""
    difficulties = sorted({difficulty for difficulty, _ in curves})
    figure = Figure(figsize=(4.6 * len(difficulties), 4.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(difficulties), squeeze=False)[0]
    for axes, difficulty in zip(panels, difficulties, strict=True):
        style_axes(axes)
        axes.set_title(f"difficulty {difficulty}", loc="left", fontsize=11.5, color=INK, fontweight="bold")
        for recipe in (name for which, name in curves if which == difficulty and name != PLAIN):
            runs = curves[difficulty, recipe]
            steps = sorted(set.intersection(*(set(run.accuracy) for run in runs)))
            by_step = [[run.accuracy[step] for run in runs] for step in steps]
            axes.plot(steps, [mean(values) for values in by_step], color=COLORS[recipe], linewidth=1.8, label=recipe)
            low, high = [min(values) for values in by_step], [max(values) for values in by_step]
            axes.fill_between(steps, low, high, color=COLORS[recipe], alpha=0.12, linewidth=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panels[0].legend(loc="lower right", frameon=False, fontsize=9, labelcolor=GREY)
    figure.suptitle("Greedy accuracy on held-out problems", fontsize=12, color=INK)
    figure.savefig(picture, dpi=130)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs, the table and the picture")
    parser.add_argument("--recipes", default=",".join((*RECIPES, PLAIN)), type=lambda text: text.split(","))
    parser.add_argument("--difficulties", default="1,2,3", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    recipes = {**RECIPES, PLAIN: (*RECIPES["GRPO"], "actor_rollout_ref.model.enable_activation_offload=False")}
    if unknown := [name for name in options.recipes if name not in recipes]:
        parser.error(f"--recipes: got {', '.join(unknown)}, expected some of {', '.join(recipes)}")
    if unknown_levels := [level for level in options.difficulties if level not in DIFFICULTIES]:
        parser.error(f"--difficulties: got {unknown_levels}, expected some of {list(DIFFICULTIES)}")
    console = Console()
    curves: dict[tuple[int, str], list[Curve]] = {}
    cells = [(d, r, s) for s in options.seeds for d in options.difficulties for r in options.recipes]
    for number, (difficulty, recipe, seed) in enumerate(cells, 1):
        folder = (options.out / f"{recipe}-{difficulty}-{seed}".replace(" ", "-")).absolute()
        console.print(f"{number}/{len(cells)}: {recipe}, difficulty {difficulty}, seed {seed}", highlight=False)
        own = (
            "experiment=arithmetic",
            f"data.arithmetic.difficulty={difficulty}",
            *DIFFICULTIES[difficulty],
            f"trainer.seed={seed}",
        )
        where = ("trainer.test_freq=10", f"trainer.default_local_dir={folder / 'runs'}")
        train(folder, (*own, *recipes[recipe], *where, *options.overrides))
        curves.setdefault((difficulty, recipe), []).append(read(folder))
    curves = {key: curves[key] for key in sorted(curves, key=lambda key: (key[0], options.recipes.index(key[1])))}
    console.print(table(curves))
    draw(curves, options.out / "learning.png")
    console.print(f"picture: {options.out / 'learning.png'}", highlight=False)
    for difficulty in options.difficulties:
        if (difficulty, PLAIN) in curves and (difficulty, "GRPO") in curves:
            found = "equal" if curves[difficulty, PLAIN] == curves[difficulty, "GRPO"] else "DIFFERENT"
            console.print(f"difficulty {difficulty}: with and without offload the curves are {found}")


if __name__ == "__main__":
    main()
