"""Train the tiny model on each built-in task, and say how many points of held-out accuracy it wins.

    python -m rlx.benchmarks.learns --out FOLDER [--tasks guessing-ppo,…] [--seed 7] [key=value ...]

The command exits with 1 if a task wins fewer points than it has to. Runs that have finished in the folder are not repeated.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from rlx.benchmarks.learning import Curve, read, train

SEEDS = ("trainer.seed", "actor_rollout_ref.model.tiny.seed")
PPO_RUN = "algorithm.adv_estimator=gae"
ADAPTERS = (  # alone, and a KL to the actor without them
    "actor_rollout_ref.model.lora_rank=16",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.actor.optim.lr=4e-3",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


class Task(NamedTuple):
    """Settings of a run, and the points of held-out accuracy that it has to win.

    Rounding differs between processors, and with it the warm start; so each task has to win only a part of its points in the runs
    of docs/benchmarks.md and docs/tools.md.
    """

    settings: tuple[str, ...]
    points: int = 10


TASKS = {
    "arithmetic-grpo": Task(("experiment=arithmetic",)),
    "arithmetic-ppo": Task(("experiment=arithmetic", PPO_RUN)),
    "arithmetic-adapters": Task(("experiment=arithmetic", *ADAPTERS)),
    "calculator-grpo": Task(("experiment=calculator",), points=20),
    "guessing-grpo": Task(("experiment=guessing",)),
    "guessing-ppo": Task(("experiment=guessing", PPO_RUN)),
}


def points(curve: Curve) -> float:
    """Return the held-out accuracy of the last validation less that of the first, in points."""
    accuracies = list(curve.accuracy.values())
    return 100 * (accuracies[-1] - accuracies[0])


def row(name: str, curve: Curve, seconds: float) -> tuple[str, ...]:
    """Return the table's row of a task."""
    won, needed = points(curve), TASKS[name].points
    path = " ".join(f"{value:.1%}" for value in curve.accuracy.values())
    verdict = "right" if won >= needed else "TOO FEW"
    return name, path, f"{won:+.1f}", str(needed), verdict, f"{seconds:.0f}"


def main(arguments: list[str] | None = None) -> int:
    """Run with the command line."""
    parser = argparse.ArgumentParser(prog="python -m rlx.benchmarks.learns", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--tasks", default=",".join(TASKS), type=lambda text: text.split(","))
    parser.add_argument(
        "--seed", type=int, help="of sampling, first weights and warm start; without it the recipes' own"
    )
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.tasks if name not in TASKS]:
        parser.error(f"--tasks: got {', '.join(unknown)}, expected some of {', '.join(TASKS)}")
    found = Table("task", "accuracy", "points", "needed", "verdict", "s", title="held-out accuracy at each validation")
    console, right = Console(width=110), True
    own = [] if given.seed is None else [f"{key}={given.seed}" for key in SEEDS]
    ending = f"-seed-{given.seed}" if own else ""
    for name in given.tasks:
        folder, begin = (given.out / f"{name}{ending}").absolute(), time.monotonic()
        console.print(folder.name, highlight=False)
        train(folder, (*TASKS[name].settings, *own, f"trainer.default_local_dir={folder / 'runs'}", *given.overrides))
        curve = read(folder)
        right = right and points(curve) >= TASKS[name].points
        found.add_row(*row(name, curve, time.monotonic() - begin))
    console.print(found)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
