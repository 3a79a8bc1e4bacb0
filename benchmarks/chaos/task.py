"""The run that is broken: a tiny untrained model on two processes, 12 steps, a save every third."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from faults import ENTRY

ROOT = Path(__file__).parents[2]
STEPS = 12
TASK = (
    "experiment=arithmetic",
    f"custom_reward_function.path={Path(__file__).with_name('reward.py')}",
    "data.train_batch_size=8",
    "data.max_response_length=16",
    "data.arithmetic.train_size=256",
    "data.arithmetic.val_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
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
# Several engines for each worker; they start more slowly than the runs above may be silent.
ENGINES = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.engines_per_gpu=2",
    "trainer.hang_timeout_s=90",
)
LOCAL_RAY = ("+ray_kwargs.ray_init.num_cpus=2", "+ray_kwargs.ray_init.object_store_memory=100000000")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIMIT_S = 400.0  # for one command


def make_model(folder: Path) -> str:
    """Write the model that runs start from, and return the override that names it."""
    from rlx.models.tiny import TinyModelConfig, make_tiny

    for part in make_tiny(TinyModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)):
        part.save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


def command_in(folder: Path, extra: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return the command for runs in a folder, and its environment."""
    command = [sys.executable, "-m", ENTRY, *TASK, f"trainer.default_local_dir={folder}", *extra]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    return command, environment


def start(folder: Path, extra: Sequence[str], added: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Start the command for runs in a folder, with added environment variables and options of Popen."""
    command, environment = command_in(folder, extra)
    return subprocess.Popen(command, env={**environment, **added}, preexec_fn=_as_by_hand, **options)


def _as_by_hand() -> None:
    """Take Ctrl-C also if a shell started the harness in the background, and end with the harness."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def newest(folder: Path) -> Path:
    """The folder of the last run."""
    return max(each.parent for each in folder.glob("*/metrics.jsonl"))
