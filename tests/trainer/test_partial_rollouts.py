"""Samples that go on in later steps: the order of prompts, replay, resume, and what is rejected. Docs: docs/async.md."""

import json

import pytest
from run_tools import results, resume_from

STALE = [
    "actor_rollout_ref.rollout.partial.max_staleness=2",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.transcripts=True",
]
OWN = """
from rlx.environments.protocol import Observation

def varied(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 16

class Echo:
    def reset(self, row):
        self.seed = row["seed"]
        return row["prompt"]

    def step(self, turn):
        if turn.index == 1 and self.seed % 7 == 0:
            raise ValueError("unlucky")
        reward = len(set(turn.text)) / 16
        return Observation([{"role": "user", "content": str(self.seed % 10)}], reward, turn.index == 2)
"""


@pytest.fixture
def learning(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return [f"custom_reward_function.path={tmp_path / 'own.py'}", "custom_reward_function.name=varied"]


@pytest.fixture
def talking(tmp_path, learning):
    environment = [f"environment.path={tmp_path / 'own.py'}", "environment.name=Echo", "environment.rewards=replace"]
    turns = "actor_rollout_ref.rollout.multi_turn.max_turn_tokens=14"
    return [*environment, turns, "environment.processes=1", "data.max_response_length=48"]


def transcript(folder, step):
    lines = (folder / "transcripts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def prompts_of(folder, step):
    return [each["tokens"][: each["loss_mask"].index(1)] for each in transcript(folder, step)]


def same(found, expected):
    numbers = ({name: x for name, x in results(each).items() if not name.endswith("_s")} for each in (found, expected))
    return next(numbers) == next(numbers)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_unfinished_samples_and_repeats_to_the_bit(train, learning):
    folder, unbroken = train(*STALE, *learning)
    queue = json.loads((folder / "checkpoints/global_step_2/queue.json").read_text())["queue"]
    assert [draw["step"] for draw in queue] == [3, 4], "the run ends with step 4, so no later prompts are drawn"
    counts = [[len(kept["token_ids"]) for kept in draw["kept"]] for draw in queue]
    assert max(counts[0]) > 6 >= max(counts[1]) > 0, "a round has 16 / 3 tokens, rounded up"
    assert any(not kept["is_finished"] for kept in queue[0]["kept"])
    assert not (folder / "checkpoints/global_step_4/queue.json").exists()
    for step, gap in ((1, 0), (2, 1), (3, 2), (4, 2)):
        metrics = unbroken[step]
        assert metrics["staleness/max"] == gap
        assert sum(metrics.get(f"staleness/gap_{each}_share", 0.0) for each in range(3)) == pytest.approx(1)
        assert metrics["mismatch/gap_0/mean_abs_log_prob"] < 1e-5, "of numerics alone"
        assert gap == 0 or metrics[f"mismatch/gap_{gap}/mean_abs_log_prob"] > 1e-4
    trained = {step: transcript(folder, step) for step in (3, 4)}
    _, resumed = train(*STALE, *learning, *resume_from(folder, 2))
    for step, before in trained.items():
        assert transcript(folder, step) == before and results(resumed[step]) == results(unbroken[step])
    alone, synchronous = train(*STALE[1:], *learning, "trainer.save_freq=-1")
    for step in range(1, 5):
        assert prompts_of(alone, step) == prompts_of(folder, step), "no prompt is skipped, none comes twice"
    own = {
        name: x
        for name, x in results(unbroken[1]).items()
        if not name.startswith(("partial/", "staleness/", "mismatch/gap_"))
    }
    assert own == results(synchronous[1]), "the first step has its own prompts to their end"


@pytest.mark.e2e
@pytest.mark.slow
def test_conversations_go_on_in_mid_turn_and_their_environments_are_restored(train, talking):
    folder, unbroken = train(*STALE, *talking)
    queue = json.loads((folder / "checkpoints/global_step_2/queue.json").read_text())["queue"]
    kept = [each for draw in queue for each in draw["kept"]]
    assert any(each["begun"][0] and len(each["seen"]) > 1 for each in kept), "a second turn is begun"
    for step, gap in ((1, 0), (2, 1), (3, 2), (4, 2)):
        assert unbroken[step]["staleness/max"] == gap
        assert 1 < unbroken[step]["conversation/turns_mean"] < 3 and unbroken[step]["conversation/failures"] > 0
        assert unbroken[step]["mismatch/gap_0/max_abs_log_prob"] < 1e-4
    trained = {step: transcript(folder, step) for step in (3, 4)}
    _, resumed = train(*STALE, *talking, *resume_from(folder, 2))
    for step, before in trained.items():
        after = transcript(folder, step)
        for name in ("token_ids", "loss_mask", "advantages", "reward", "reason", "log_prob_gap"):
            assert [each[name] for each in after] == [each[name] for each in before]
        assert same(resumed[step], unbroken[step])
    first = transcript(folder, 1)
    alone, _ = train(*STALE[1:], *talking, "trainer.total_training_steps=1")
    for name in ("token_ids", "loss_mask", "reward", "reason"):
        assert [each[name] for each in first] == [each[name] for each in transcript(alone, 1)]
