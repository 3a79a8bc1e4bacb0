"""The run that is broken: a tiny model on two processes, 12 steps, a save every third."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from faults import ENTRY

ROOT = Path(__file__).parents[2]
STEPS = 12
TASK = (
    "experiment=arithmetic",
    "data.train_batch_size=8",
    "data.arithmetic.train_size=256",
    "data.arithmetic.val_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6",
    "actor_rollout_ref.rollout.n=4",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=3",
    "trainer.test_freq=6",
    "trainer.val_before_train=True",
    "trainer.logger=[console,jsonl]",
    "trainer.resume_mode=auto",
    "trainer.hang_timeout_s=20",
    "trainer.max_restarts=3",
)
LIMIT_S = 600.0


def command_in(folder: Path, extra: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command for runs in a folder, and its environment."""
    command = [sys.executable, "-m", ENTRY, *TASK, f"trainer.default_local_dir={folder}", *extra]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    return command, environment


def newest(folder: Path) -> Path:
    """The folder of the last run."""
    return max(each.parent for each in folder.glob("*/metrics.jsonl"))
