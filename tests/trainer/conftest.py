"""Whole runs of the trainer in this process: real Ray, real FSDP with gloo, a tiny model."""

import sys
from pathlib import Path

import pytest

from rlx.config.compose.command_line import compose
from rlx.trainer.launch import launch

sys.path.insert(0, str(Path(__file__).parent))  # for run_tools


@pytest.fixture
def short_run(untrained, tmp_path) -> list[str]:
    """Overrides that cut the arithmetic experiment short."""
    return [
        *("experiment=arithmetic", f"actor_rollout_ref.model.path={untrained}"),
        *(f"trainer.default_local_dir={tmp_path / 'runs'}", "data.train_batch_size=8", "data.max_response_length=16"),
        *("data.val_max_samples=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6", "actor_rollout_ref.rollout.n=4"),
        *("trainer.logger=[jsonl]", "trainer.test_freq=-1", "trainer.val_before_train=False"),
    ]


@pytest.fixture
def train(short_run, ray_session):
    """train(*overrides) runs the shortened experiment and returns (run folder, metrics by step)."""

    from run_tools import metrics_of

    def start(*overrides: str) -> tuple[Path, dict[int, dict[str, float]]]:
        composed = compose([*short_run, *overrides])
        assert not composed.faults, composed.faults
        folder = launch(composed.config, composed.yaml)
        return folder, metrics_of(folder)

    return start


@pytest.fixture
def learning(tmp_path) -> list[str]:
    """A reward that varies with every sample."""
    from run_tools import OWN

    (tmp_path / "own.py").write_text(OWN)
    return [f"custom_reward_function.path={tmp_path / 'own.py'}", "custom_reward_function.name=varied"]


@pytest.fixture
def talking(tmp_path, learning) -> list[str]:
    """Conversations of up to three turns, some of which fail."""
    environment = [f"environment.path={tmp_path / 'own.py'}", "environment.name=Echo", "environment.rewards=replace"]
    turns = "actor_rollout_ref.rollout.multi_turn.max_turn_tokens=14"
    return [*environment, turns, "environment.processes=1", "data.max_response_length=48"]
