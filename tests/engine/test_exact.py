"""`rollout.exact` in the engine: updates with operations that sampler and trainer share. Their kernels are held on GPUs alone."""

import pytest
import torch


def agree(plain, shared):
    assert (plain[0] - shared[0]).abs().max() < 1e-12
    assert shared[1] == pytest.approx(plain[1], rel=1e-9, abs=1e-12)
    assert (plain[2] - shared[2]).norm() < 1e-12 * plain[2].norm()
    for name, weight in plain[3].items():
        torch.testing.assert_close(shared[3][name], weight, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("save", [None, "all", "attention"])
def test_updates_are_those_with_operations_of_transformers(save, model_folder, one_rank):
    agree(*one_rank("exact", "updates", model_folder, save, [8])[0])


def test_two_processes(model_folder, two_ranks):
    for plain, shared in two_ranks("exact", "updates", model_folder, "attention", [5, 3]):
        agree(plain, shared)


def test_the_first_update_of_a_step_finds_a_changed_bit(model_folder, one_rank):
    ((calls, metrics, error),) = one_rank("exact", "step", model_folder, 0.0)
    assert calls == ["actor.update_equal", "actor.update"] and not error
    assert metrics["mismatch/max_abs_log_prob"] == 0 and "actor/entropy" in metrics
    ((calls, _, error),) = one_rank("exact", "step", model_folder, 1e-15)
    assert calls == ["actor.update_equal"] and "differ at 1 of" in error and "first at token 1" in error
