"""A sampler in processes of its own: `trainer.n_rollout_gpus`. Docs: docs/async.md."""

import pytest
from run_tools import OWN, results

OF_ONE = ["trainer.total_training_steps=2", "trainer.transcripts=True", "trainer.save_freq=1"]


@pytest.fixture
def learning(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return [f"custom_reward_function.path={tmp_path / 'own.py'}", "custom_reward_function.name=varied"]


@pytest.mark.e2e
@pytest.mark.slow
def test_without_staleness_a_sampler_of_its_own_gives_the_synchronous_run(train, learning):
    folder, together = train(*OF_ONE, *learning)
    own, apart = train(*OF_ONE, *learning, "trainer.n_rollout_gpus=1")
    assert {step: results(each) for step, each in apart.items()} == {
        step: results(each) for step, each in together.items()
    }
    for name in ("transcripts/step_000002.jsonl", "checkpoints/global_step_2/actor/model"):
        files = sorted((folder / name).glob("*")) or [folder / name]
        for file in files:
            assert file.read_bytes() == (own / file.relative_to(folder)).read_bytes()
