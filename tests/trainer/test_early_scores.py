"""Samples are scored while others are sampled: with real Ray, the hf sampler, and a reward that leaves a file for each call."""

import time

import pytest
from run_tools import results

from rlx.cluster.group import WorkerGroup
from rlx.cluster.placement import Placement
from rlx.rollout.protocol import EngineError
from rlx.workers.worker import Worker

pytestmark = pytest.mark.e2e

REWARD = """
from pathlib import Path
from uuid import uuid4

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    (Path(__file__).parent / "scored" / f"{uuid4()}").touch()
    return {"score": len(set(solution_str)) / 16, "index": extra_info["index"]}
"""
SAMPLES, SAMPLER_STEPS = 32, 4  # of a training step


def slow_worker(scored):
    """A worker whose sampler goes on only after what it has finished is scored, and fails once, in the second training step.

    It is defined here so that it travels by value: tests are no package that workers could import.
    """

    class Slow(Worker):
        def __init__(self, config, roles):
            super().__init__(config, roles)
            sampler, finished, calls = self.roles["rollout"].sampler, [], []
            step = sampler.step

            def wait_and_step():
                calls.append("step")
                until_s = time.monotonic() + 100
                while len(calls) % SAMPLER_STEPS != 1 and len([*scored.iterdir()]) < len(finished):
                    if time.monotonic() > until_s:
                        raise TimeoutError(
                            f"{len(finished)} samples are finished, {len([*scored.iterdir()])} are scored"
                        )
                    time.sleep(0.05)
                if len(calls) == SAMPLER_STEPS + 2:
                    raise EngineError("injected")
                finished.extend(stopped := step())
                return stopped

            sampler.step = wait_and_step

    return Slow


@pytest.mark.slow
def test_samples_are_scored_before_the_last_is_sampled_with_the_same_numbers(train, tmp_path, monkeypatch, capfd):
    rewards, scored = tmp_path / "rewards.py", tmp_path / "scored"
    rewards.write_text(REWARD)
    parts = f"[{{path: {rewards}, weight: 0.5}}, {{weight: 0.25}}]"
    options = [f"custom_reward_function={parts}", "trainer.total_training_steps=2", "reward.num_workers=2"]
    options += [f"actor_rollout_ref.rollout.max_num_seqs={SAMPLES // SAMPLER_STEPS}", "trainer.logger=[console,jsonl]"]
    scored.mkdir()
    _, usual = train(*options)
    scored.rename(tmp_path / "usual")
    scored.mkdir()
    slow = slow_worker(scored)
    monkeypatch.setattr(
        "rlx.trainer.launch.start_workers", lambda config: WorkerGroup(Placement.reserve(1, [1], "cpu"), slow)
    )
    _, early = train(*options)
    assert {step: results(row) for step, row in early.items()} == {step: results(row) for step, row in usual.items()}
    assert early[2]["reward/extra/compute_score/index"] > 0 and early[2]["reward/extra/rule"] <= 1
    parts = 0.5 * early[2]["reward/extra/compute_score"] + 0.25 * early[2]["reward/extra/rule"]
    assert early[2]["reward/mean"] == pytest.approx(parts)
    assert len([*scored.iterdir()]) == 2 * SAMPLES, (
        "those that the sampler repeats after its failure are not scored again"
    )
    assert "the sampler failed and is started again: injected" in capfd.readouterr().out
