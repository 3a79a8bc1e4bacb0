"""A whole run that samples with vLLM: two processes around one tensor-parallel engine, and activations that leave the device."""

import json

import pytest
from run_tools import results, resume_from

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("cpu_vllm")]

REWARD = """
def varied(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 16
"""


@pytest.fixture
def varied(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return [f"custom_reward_function.path={tmp_path / 'reward.py'}", "custom_reward_function.name=varied"]


@pytest.mark.slow
def test_two_processes_sample_with_one_engine_and_a_resumed_run_equals_an_unbroken_one(train, varied):
    options = [
        *varied,
        *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",
        *("actor_rollout_ref.rollout.temperature=0.8", "actor_rollout_ref.rollout.val_kwargs.do_sample=True"),
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.5",
        *("actor_rollout_ref.model.activation_offload.min_bytes=0", "actor_rollout_ref.actor.optim.lr=1e-2"),
        *("trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=2"),
    ]
    folder, steps = train(*options)
    assert set(steps) == {1, 2}
    for metrics in steps.values():
        assert 0 < metrics["mismatch/max_abs_log_prob"] < 1e-4, "the sampler has the weights of this step"
        assert metrics["mismatch/ess_token"] == pytest.approx(1, abs=1e-6) and metrics["mismatch/ratio_beyond_2"] == 0
        assert metrics["actor/grad_norm"] > 0 and metrics["train/skipped_steps"] == 0
        assert metrics["perf/offload/actor/offloaded_bytes"] > 0
        assert metrics["perf/tokens"] > 0 and metrics["response_length/max"] <= 16
    assert steps[2]["val/reward"] > 0
    assert abs(steps[2]["actor/entropy"] - steps[1]["actor/entropy"]) > 1e-3, "the policy changed"
    resumed = train(*options, *resume_from(folder, 1))[1]
    assert results(resumed[2]) == pytest.approx(results(steps[2]), rel=1e-4, abs=1e-6)


@pytest.mark.nightly
def test_samples_that_go_on_in_later_steps_are_those_of_hf_on_two_engines_too(train, varied):
    options = [
        *varied,
        "actor_rollout_ref.rollout.partial.max_staleness=2",
        "actor_rollout_ref.rollout.top_p=0.95",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.total_training_steps=4",
        "trainer.transcripts=True",
    ]
    vllm = [
        "rollout.name=vllm",
        "rollout.engines_per_gpu=2",
        "rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",
    ]
    found = []
    for sampler in (["rollout.name=hf"], vllm):
        folder, steps = train(*options, *(f"actor_rollout_ref.{each}" for each in sampler))
        assert [steps[step]["staleness/max"] for step in sorted(steps)] == [0, 1, 2, 2]
        assert all(steps[step]["mismatch/gap_0/mean_abs_log_prob"] < 1e-5 for step in (2, 3, 4))
        lines = [(folder / "transcripts" / f"step_{step:06d}.jsonl").read_text().splitlines() for step in sorted(steps)]
        found.append([[json.loads(line)["tokens"] for line in of_step] for of_step in lines])
    assert found[0] == found[1]
