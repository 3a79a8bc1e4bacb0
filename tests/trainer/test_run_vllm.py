"""A whole run that samples with vLLM: two processes around one tensor-parallel engine, and activations that leave the device."""

import pytest
from run_tools import results, resume_from

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("cpu_vllm")]

REWARD = """
def varied(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 16
"""


@pytest.mark.slow
def test_two_processes_sample_with_one_engine_and_a_resumed_run_equals_an_unbroken_one(train, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    options = [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",
        "actor_rollout_ref.rollout.temperature=0.8",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.5",
        "actor_rollout_ref.model.activation_offload.min_bytes=0",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        f"custom_reward_function.path={reward}",
        "custom_reward_function.name=varied",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
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
