"""A sampler in processes of its own: `trainer.n_rollout_gpus`. Docs: docs/async.md."""

import json

import pytest
from run_tools import OWN, results, resume_from

APART = "trainer.n_rollout_gpus=1"
STALE = ["actor_rollout_ref.rollout.partial.max_staleness=2", "algorithm.rollout_correction.rollout_is=token"]
SHORT = ["trainer.total_training_steps=2", "trainer.transcripts=True", "trainer.save_freq=1"]


@pytest.fixture
def learning(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return [f"custom_reward_function.path={tmp_path / 'own.py'}", "custom_reward_function.name=varied"]


@pytest.fixture
def talking(tmp_path, learning):
    environment = [f"environment.path={tmp_path / 'own.py'}", "environment.name=Echo", "environment.rewards=replace"]
    turns = "actor_rollout_ref.rollout.multi_turn.max_turn_tokens=14"
    return [*environment, turns, "environment.processes=1", "data.max_response_length=48"]


def computed(metrics):
    return {name: x for name, x in results(metrics).items() if not name.endswith("_s")}


def weights(folder, step):
    return {file.name: file.read_bytes() for file in folder.glob(f"checkpoints/global_step_{step}/actor/model/*")}


def samples(folder, step):
    lines = (folder / "transcripts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    names = ("token_ids", "loss_mask", "advantages", "reward")
    return [{name: json.loads(line)[name] for name in names} for line in lines]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("task", ["learning", "talking"])
def test_without_staleness_a_sampler_of_its_own_gives_the_synchronous_run(train, task, request):
    task = request.getfixturevalue(task)
    folder, together = train(*SHORT, *task)
    own, apart = train(*SHORT, *task, APART)
    for step in (1, 2):
        assert computed(apart[step]) == computed(together[step]) and samples(own, step) == samples(folder, step)
        assert weights(own, step) == weights(folder, step) != {}


@pytest.mark.e2e
@pytest.mark.slow
def test_later_samples_are_generated_while_a_step_trains_and_a_resumed_run_repeats_them(train, learning):
    settings = [*SHORT[1:], *STALE, *learning, APART, "trainer.total_training_steps=4"]
    folder, unbroken = train(*settings)
    queue = json.loads((folder / "checkpoints/global_step_2/queue.json").read_text())["queue"]
    assert [draw["step"] for draw in queue] == [3, 4], "the run ends with step 4, so no later prompts are drawn"
    assert all(kept["is_finished"] for kept in queue[0]["kept"]), "the next step begins at once"
    open_rows = [kept for kept in queue[1]["kept"] if not kept["is_finished"]]
    assert open_rows and all(kept["token_ids"] for kept in open_rows)
    assert [unbroken[step]["staleness/max"] for step in range(1, 5)] == [0, 1, 2, 2]
    assert unbroken[1]["mismatch/gap_0/mean_abs_log_prob"] < 1e-5 < unbroken[3]["mismatch/gap_2/mean_abs_log_prob"]
    _, resumed = train(*settings, *resume_from(folder, 2))
    for step in (3, 4):
        assert results(resumed[step]) == results(unbroken[step])
