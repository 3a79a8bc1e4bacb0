"""Train the tiny model on each built-in task, and say how many points of held-out accuracy it wins.

    python -m benchmarks.learns --out FOLDER [--tasks guessing-ppo,…] [--seed 7] [key=value ...]

The command exits with 1 if a task fails, wins fewer points than it has to, or has too little to learn. Each call has a folder of
its own in FOLDER.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.learning import Curve, read, train

SEEDS = ("trainer.seed", "actor_rollout_ref.model.tiny.seed")
PPO_RUN = "algorithm.adv_estimator=gae"
ADAPTERS = (  # alone, and a KL to the actor without them
    "actor_rollout_ref.model.lora_rank=16",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.actor.optim.lr=4e-3",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


class Task(NamedTuple):
    """Settings of a run, and how it has to learn.

    Rounding differs between processors, and with it the warm start; so each task has to win only a part of its points in the runs
    of docs/benchmarks.md and docs/tools.md.

    Args:
        settings: overrides of the run.
        below: the accuracy of the first validation has to be lower, so that the warm start leaves something to learn.
        points: of held-out accuracy that it has to win from the first validation to the last.
        reward: by which the sampled reward has to rise, from the mean of the first five steps to that of the last five.
    """

    settings: tuple[str, ...]
    below: float = 0.55
    points: int = 10
    reward: float = 0.08


TASKS = {
    "arithmetic-grpo": Task(("experiment=arithmetic",)),
    "arithmetic-ppo": Task(("experiment=arithmetic", PPO_RUN)),
    "arithmetic-adapters": Task(("experiment=arithmetic", *ADAPTERS)),
    "calculator-grpo": Task(("experiment=calculator",), below=0.3, points=20, reward=0.15),
    "guessing-grpo": Task(("experiment=guessing",), below=0.5),
    "guessing-ppo": Task(("experiment=guessing", PPO_RUN), below=0.5),
}


def points(curve: Curve) -> float:
    """Return the held-out accuracy of the last validation less that of the first, in points."""
    accuracies = list(curve.accuracy.values())
    return 100 * (accuracies[-1] - accuracies[0])


def reward_gain(curve: Curve) -> float:
    """Return the mean sampled reward of the last five steps less that of the first five."""
    rewards = list(curve.reward.values())
    return mean(rewards[-5:]) - mean(rewards[:5])


def faults(task: Task, curve: Curve) -> list[str]:
    """Return how a finished run falls short of its task."""
    first = next(iter(curve.accuracy.values()))
    found = {
        f"TOO GOOD before, {task.below:.0%} or more": first >= task.below,
        f"TOO FEW points, below {task.points}": points(curve) < task.points,
        f"TOO LITTLE reward, below {task.reward:+.2f}": reward_gain(curve) < task.reward,
    }
    return [fault for fault, is_so in found.items() if is_so]


def learned(name: str, folder: Path, overrides: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Train on a task, and return whether it learned as it has to and its row of the table."""
    begin = time.monotonic()
    try:
        train(folder, (*TASKS[name].settings, f"trainer.default_local_dir={folder / 'runs'}", *overrides))
        curve = read(folder)
        found = faults(TASKS[name], curve)
    except Exception as error:  # the other tasks go on
        print(f"{name}: {error}", file=sys.stderr)
        return False, (name, "", "", "", f"FAILED: {type(error).__name__}", f"{time.monotonic() - begin:.0f}")
    path = " ".join(f"{value:.1%}" for value in curve.accuracy.values())
    figures = (path, f"{points(curve):+.1f}", f"{reward_gain(curve):+.3f}")
    return not found, (name, *figures, "; ".join(found) or "right", f"{time.monotonic() - begin:.0f}")


def main(arguments: list[str] | None = None) -> int:
    """Run with the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learns", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the folders of all calls")
    parser.add_argument("--tasks", default=",".join(TASKS), type=lambda text: text.split(","))
    parser.add_argument(
        "--seed", type=int, help="of sampling, first weights and warm start; without it the recipes' own"
    )
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.tasks if name not in TASKS]:
        parser.error(f"--tasks: got {', '.join(unknown)}, expected some of {', '.join(TASKS)}")
    found = Table("task", "accuracy", "points", "reward", "verdict", "s", title="held-out accuracy at each validation")
    console, right = Console(width=120), True
    own = [] if given.seed is None else [f"{key}={given.seed}" for key in SEEDS]
    out = (given.out / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")).absolute()
    for name in given.tasks:
        console.print(out / name, highlight=False)
        has_learned, row = learned(name, out / name, (*own, *given.overrides))
        right = right and has_learned
        found.add_row(*row)
    console.print(found)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
