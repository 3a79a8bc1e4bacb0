from rlx.trainer import phases
from rlx.trainer.phases import PHASES


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
    assert phases.memory_of(usage) == {
        "memory/rollout_before_gb": 2.0,
        "memory/rollout_after_gb": 9.0,
        "memory/update_actor_before_gb": 2.0,
        "memory/update_actor_after_gb": 4.0,
        "memory/update_actor_after_allocated_gb": 0.7,
    }


def test_a_phase_of_several_calls_goes_from_the_first_to_the_last_that_was_made():
    both = [noted(actor__begin_save=(1.0, 2.0), critic__begin_save=(3.0, 4.0))]
    assert phases.memory_of(both, ["checkpoint"]) == {
        "memory/checkpoint_before_gb": 1.0,
        "memory/checkpoint_after_gb": 4.0,
    }
    one = [noted(actor__begin_save=(1.0, 2.0))]
    assert phases.memory_of(one, ["checkpoint"]) == {
        "memory/checkpoint_before_gb": 1.0,
        "memory/checkpoint_after_gb": 2.0,
    }


def test_every_phase_but_the_drivers_own_has_calls_whose_memory_is_noted():
    assert set(phases.OF_STEP) < set(PHASES)
    assert [name for name, phase in PHASES.items() if not phase.calls] == ["advantages"]


def test_what_waits_on_the_host_is_that_of_the_fullest_process():
    usage = [
        {"memory/host_reserved_gb": 3.0, "peak_memory_gb": 9.0},
        {"memory/host_reserved_gb": 4.0, "peak_memory_gb": 1.0},
    ]
    assert phases.memory_on_host(usage) == {"memory/host_reserved_gb": 4.0}
