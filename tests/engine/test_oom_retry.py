"""Out of memory in an update: repeated once with less on the device, as if nothing had been, or refused with a reason."""

import pytest


@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("processes", ["one_rank", "two_ranks"])
def test_a_repeated_step_is_the_undisturbed_one_bit_for_bit(processes, where, model_folder, request):
    ranks = request.getfixturevalue(processes)
    budget = 0 if where == "recomputation" else 1 << 40
    for is_equal, (usual, lowered), said in ranks("memory", "repeated", model_folder, "fsdp2", where, budget, (0, 1)):
        assert is_equal
        assert len(said) == 1 and f"out of memory in {where}" in said[0]
        assert lowered <= 0.8 * usual or not budget


def test_memory_that_runs_out_twice_ends_the_update(model_folder, one_rank):
    (error,) = one_rank("memory", "repeated", model_folder, "fsdp2", "forward", 1 << 40, (0,), 2)
    assert "also when it was repeated" in error


def test_what_cannot_begin_anew_says_so(model_folder, one_rank):
    (error,) = one_rank("memory", "repeated", model_folder, "fsdp", "forward", 1 << 40, (0,))
    assert "only a single process or FSDP2" in error


def test_all_repeat_what_one_rank_fails_in_behind_the_last_collective(model_folder, two_ranks):
    assert two_ranks("memory", "behind_the_last_collective", model_folder) == [[1, 1, 1, 2]] * 2


def test_a_rank_that_cannot_reach_the_others_ends_and_says_why(model_folder, two_ranks):
    (kind, error), _ = two_ranks("memory", "out_of_reach", model_folder)
    assert kind == "OutOfMemoryError" and "waits for this one in a collective" in error
