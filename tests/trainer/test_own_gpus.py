"""A sampler in processes of its own: `trainer.n_rollout_gpus`. Docs: docs/async.md."""

import json

import pytest
import torch
from run_tools import results, resume_from, transcript, weights

from rlx.cluster.group import WorkerGroup
from rlx.cluster.placement import Placement
from rlx.config.schema.roles import pools_of_roles
from rlx.rollout import wire
from rlx.rollout.protocol import EngineError
from rlx.workers.worker import Worker

APART = "trainer.n_rollout_gpus=1"
STALE = ["actor_rollout_ref.rollout.partial.max_staleness=2", "algorithm.rollout_correction.rollout_is=token"]
SHORT = ["trainer.total_training_steps=2", "trainer.transcripts=True", "trainer.save_freq=1"]

DEADLY = """
import psutil
from pathlib import Path

def kill_an_engine(data_source, solution_str, ground_truth, extra_info=None):
    try:
        Path(__file__).with_name("killed").touch(exist_ok=False)
    except FileExistsError:
        return len(set(solution_str)) / 16
    programs = psutil.process_iter(["cmdline"])  # None of one that has ended meanwhile
    engines = [each for each in programs if "rlx.rollout.engine_process" in (each.info["cmdline"] or ())]
    engines[0].kill()
    return 0.0
"""


def computed(metrics):
    return {name: x for name, x in results(metrics).items() if not name.endswith("_s")}


def samples(folder, step):
    names = ("token_ids", "loss_mask", "advantages", "reward")
    return [{name: sample[name] for name in names} for sample in transcript(folder, step)]


def failing_worker():
    """A worker whose sampler fails at the first sync after training, in the middle of the weights; the next one does not.

    It is defined here so that it travels by value: tests are no package that workers could import.
    """

    class Failing(Worker):
        def __init__(self, config, roles):
            super().__init__(config, roles)
            wire.BUCKET_BYTES = 4096  # weights are larger
            if role := self.roles.get("rollout"):
                self.update, role.sampler.update_weights = role.sampler.update_weights, self.fail

        def fail(self, weights, version):
            if version > 0:
                next(iter(weights))
                raise EngineError("injected")
            self.update(weights, version)

    return Failing


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("task", ["learning", "talking"])
def test_without_staleness_a_sampler_of_its_own_that_is_replaced_gives_the_synchronous_run(
    train, task, request, monkeypatch, capfd
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else two processes have fewer threads each, and other last digits
    failing, settings = failing_worker(), [*SHORT, *request.getfixturevalue(task), "trainer.logger=[console,jsonl]"]

    def start(config):
        pools = [1] * (1 + config.trainer.n_rollout_gpus)
        return WorkerGroup(Placement.reserve(1, pools, "cpu"), failing, pool_of=pools_of_roles(config))

    def fail():
        monkeypatch.setattr("rlx.trainer.launch.start_workers", start)

    if task == "talking":
        fail()
    folder, together = train(*settings)
    fail()
    own, apart = train(*settings, APART)
    failures = capfd.readouterr().out.count("the sampler failed and is started again: injected")
    assert failures == (2 if task == "talking" else 1)
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
    waits = [(unbroken[step]["perf/rollout/generate_s"], unbroken[step]["perf/rollout/idle_s"]) for step in (1, 2, 3)]
    assert all(generated > 0 <= idle for generated, idle in waits)
    _, resumed = train(*settings, *resume_from(folder, 2))
    for step in (3, 4):
        assert results(resumed[step]) == results(unbroken[step])


@pytest.mark.e2e
@pytest.mark.nightly
def test_samples_go_on_after_an_engine_was_killed(train, tmp_path, cpu_vllm, caplog):
    (tmp_path / "deadly.py").write_text(DEADLY)
    killing = [f"custom_reward_function.path={tmp_path / 'deadly.py'}", "custom_reward_function.name=kill_an_engine"]
    vllm = ["name=vllm", "engines_per_gpu=2", "engine_kwargs.vllm.kv_cache_memory_bytes=16777216"]
    _, steps = train(
        *SHORT[1:], *STALE, *killing, APART, "trainer.total_training_steps=4",
        *(f"actor_rollout_ref.rollout.{each}" for each in vllm),
    )  # fmt: skip
    assert "the sampler failed and is started again" in caplog.text
    assert all(steps[step]["staleness/max"] <= 2 for step in range(1, 5))
    found = [steps[step].get("mismatch/gap_0/max_abs_log_prob") for step in (2, 3, 4)]
    assert 0 < max(each or 0 for each in found) < 1e-4, (
        "a step had to wait for samples of its own weights, and these were the new ones"
    )


@pytest.mark.gpu
@pytest.mark.e2e
def test_weights_go_from_one_gpu_to_another(train, learning):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings = [*SHORT, *learning, "trainer.device=cuda", "actor_rollout_ref.actor.optim.lr=1e-2"]
    _, together = train(*settings)
    _, apart = train(*settings, APART)
    for step in (1, 2):
        found, expected = (each[step]["mismatch/mean_abs_log_prob"] for each in (apart, together))
        assert found == pytest.approx(expected, rel=0.2), "older weights would be further off"
