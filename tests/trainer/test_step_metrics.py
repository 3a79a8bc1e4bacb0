"""The driver's arithmetic, against numbers worked out by hand."""

import pytest
import torch
from run_tools import responses

from rlx.algorithms.kl import KLController
from rlx.config.schema import AlgorithmConfig
from rlx.data.batch import Batch
from rlx.trainer import samples, step_metrics
from rlx.trainer.learning import add_rewards, mini_batches
from rlx.trainer.progress import PHASES


def test_spread_repeats_prompts_and_gives_each_sample_its_own_stable_seed():
    prompts = Batch.of(
        {"prompt_ids": torch.tensor([[5, 6], [0, 7]]), "prompt_mask": torch.tensor([[True, True], [False, True]])},
        {"ground_truth": ["a", "b"]},
    )
    spread = samples.spread(prompts, 3, run_seed=1, purpose="train", step=4)
    assert spread["prompt_ids"].tolist() == [[5, 6]] * 3 + [[0, 7]] * 3
    assert spread["group_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert spread.info["ground_truth"] == ["a"] * 3 + ["b"] * 3
    seeds = spread["seed"].tolist()
    assert len(set(seeds)) == 6 and min(seeds) >= 0
    again = samples.spread(prompts, 2, run_seed=1, purpose="train", step=4)["seed"].tolist()
    assert again == [*seeds[:2], *seeds[3:5]], "a sample's seed must not depend on how many samples there are"
    assert samples.spread(prompts, 3, 1, "train", 5)["seed"].tolist() != seeds


def test_mini_batches_are_cut_by_whole_prompts_and_shuffled_by_seed():
    batch = responses([1] * 8, scores=torch.arange(8, dtype=torch.float32))
    mixed = batch.rows([7, 0, 3, 4, 1, 2, 5, 6])
    plain = [mixed.rows(rows) for rows in mini_batches(mixed, 2, epochs=2, seed=None)]
    assert [sorted(p["scores"].tolist()) for p in plain] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    first, second = ([mixed.rows(rows) for rows in mini_batches(mixed, 1, 2, seed=s)] for s in (3, 3))
    groups = [p["group_id"].unique().tolist() for p in first]
    assert groups == [p["group_id"].unique().tolist() for p in second]
    assert sorted(groups[:4]) == sorted(groups[4:]) == [[0], [1], [2], [3]]
    assert groups[:4] != groups[4:], "each epoch has its own order"


def test_scores_go_to_the_last_token_and_kl_is_taken_off_each():
    log_probs = torch.zeros(2, 4)
    batch = responses([2, 0], scores=torch.tensor([1.0, 5.0]), old_log_probs=log_probs, ref_log_probs=log_probs - 0.5)
    plain, kl = add_rewards(batch, AlgorithmConfig(), KLController(0.1))
    assert kl == {}
    assert plain["token_rewards"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    with_kl, kl = add_rewards(batch, AlgorithmConfig(use_kl_in_reward=True, kl_penalty="kl"), KLController(0.1))
    torch.testing.assert_close(with_kl["token_rewards"], torch.tensor([[-0.05, 0.95, 0, 0], [0, 0, 0, 0]]))
    assert kl == {"actor/reward_kl": pytest.approx(0.25), "actor/reward_kl_coef": 0.1}, (
        "mean over samples: (0.5 + 0) / 2"
    )


def test_description():
    batch = responses(
        [4, 2, 1, 1],
        scores=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        advantages=torch.tensor([[0.0] * 4, [0.5, -0.5, 0, 0], [0.0] * 4, [0.0] * 4]),
    )
    numbers = step_metrics.describe(batch, batch)
    assert numbers["reward/mean"] == 0.75
    assert numbers["response_length/mean"] == 2.0
    assert numbers["response_length/clip_ratio"] == 0.25
    assert numbers["train/zero_advantage_share"] == 0.5, "the second prompt's, whatever the scores"


def test_bytes_of_all_processes_add_up_and_times_are_means():
    usage = [
        {"actor/offloaded_bytes": 3e6, "actor/stall_ms": 2.0, "critic/offloaded_bytes": 1e6, "critic/stall_ms": 0.0},
        {"actor/offloaded_bytes": 5e6, "actor/stall_ms": 4.0, "critic/offloaded_bytes": 1e6, "critic/stall_ms": 2.0},
    ]
    found = step_metrics.resource_use([{**usage[0], "peak_memory_gb": 2.0}, {**usage[1], "peak_memory_gb": 1.0}])
    assert found == {
        "perf/offload/actor/offloaded_bytes": 8e6,
        "perf/offload/actor/stall_ms": 3.0,
        "perf/offload/critic/offloaded_bytes": 2e6,
        "perf/offload/critic/stall_ms": 1.0,
        "perf/offloaded_mb": 10.0,
        "perf/stall_ms": 4.0,
        "perf/peak_memory_gb": 2.0,
    }
    load = {"running_mean": 2.0, "running_max": 4.0, "busy_share": 0.5, "tail_s": 1.0}
    processes = [
        {"peak_memory_gb": 1.0, **{f"load/{name}": value for name, value in load.items()}},
        {"peak_memory_gb": 1.0},
    ]
    found = step_metrics.resource_use(processes)
    assert {name: found[f"perf/rollout/{name}"] for name in load} == load
    without = {"perf/offloaded_mb": 0.0, "perf/stall_ms": 0.0, "perf/peak_memory_gb": 1.0}
    assert step_metrics.resource_use(processes[1:]) == without
    on_host = [
        {"memory/host_reserved_gb": 3.0, "peak_memory_gb": 9.0},
        {"memory/host_reserved_gb": 4.0, "peak_memory_gb": 1.0},
    ]
    assert step_metrics.resource_use(on_host)["memory/host_reserved_gb"] == 4.0, "of the fullest process"


def noted(**calls: tuple[float, float]) -> dict[str, float]:
    """What a worker reports of `role__method=(before, after)`."""
    return {
        f"memory/{name.replace('__', '.')}_{moment}_gb": value
        for name, pair in calls.items()
        for moment, value in zip(("before", "after"), pair, strict=True)
    }


def test_phases_take_the_figures_of_their_calls_from_the_process_with_the_most():
    usage = [
        noted(rollout__generate=(1.0, 9.0), actor__update=(2.0, 3.0)) | {"memory/actor.update_after_allocated_gb": 0.5},
        noted(rollout__generate=(2.0, 8.0), actor__update=(1.0, 4.0)) | {"memory/actor.update_after_allocated_gb": 0.7},
    ]
    usage[0] |= {"memory/actor.first_update_peak_allocated_gb": 6.0, "memory/actor.first_update_after_gb": 2.5}
    usage[0] |= {"memory/actor.first_update_before_gb": 2.0, "memory/actor.update_peak_allocated_gb": 1.5}
    usage[1] |= {**usage[0], **usage[1], "memory/actor.update_peak_allocated_gb": 7.0}

    assert step_metrics.memory_of(usage) == {
        "memory/rollout_before_gb": 2.0,
        "memory/rollout_after_gb": 9.0,
        "memory/update_actor_before_gb": 2.0,
        "memory/update_actor_after_gb": 4.0,
        "memory/update_actor_after_allocated_gb": 0.7,
        "memory/update_actor_peak_allocated_gb": 7.0,
    }


def test_a_phase_of_several_calls_goes_from_the_first_to_the_last_that_was_made():
    both = [noted(actor__begin_save=(1.0, 2.0), critic__begin_save=(3.0, 4.0))]
    assert step_metrics.memory_of(both, ["checkpoint"]) == {
        "memory/checkpoint_before_gb": 1.0,
        "memory/checkpoint_after_gb": 4.0,
    }
    for first in ("actor__first_update", "actor__update_equal"):
        updates = [noted(**{first: (1.0, 3.0)}, actor__update=(2.5, 2.0))]
        assert [*step_metrics.memory_of(updates).values()] == [1.0, 2.0]


def test_every_phase_but_the_drivers_own_has_calls_whose_memory_is_noted():
    assert set(step_metrics.OF_STEP) < set(PHASES)
    assert [name for name, phase in PHASES.items() if not phase.calls] == ["advantages"]
