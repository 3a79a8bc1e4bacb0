import pytest
import torch

from rlx.rollout.change_check import PER_TENSOR, ChangeCheck, StaleSamplerError, sample_of


def weights(shift=0.0, changed=1.0):
    """Two weights, of which a share is moved by `shift`."""
    tensors = {"a": torch.linspace(1, 2, 4096).view(64, 64), "b": torch.linspace(1, 2, 100)}
    for tensor in tensors.values():
        flat = tensor.view(-1)
        flat[: int(changed * len(flat))] += shift
    return tensors


def sync(check, sent, found, version=1):
    arrived = dict(check.watched(sent.items()))
    assert all(torch.equal(arrived[name], sent[name]) for name in sent)
    check.require_change(sample_of(found.values()), version)


def test_a_sample_has_the_same_elements_each_time():
    sample = sample_of([torch.arange(4 * PER_TENSOR).view(4, -1), torch.arange(3), torch.empty(0)])
    assert torch.equal(sample, torch.cat([torch.arange(0, 4 * PER_TENSOR, 4), torch.arange(3)]).float())


def test_a_sampler_that_keeps_its_weights_is_told():
    check = ChangeCheck(torch.float32)
    sync(check, weights(), weights())
    with pytest.raises(
        StaleSamplerError, match=r"version 7: 100\.0% of the policy's .* none of 1,124 .*rollout\.name=hf"
    ):
        sync(check, weights(0.1), weights(), version=7)


def test_a_sampler_with_any_new_weight_passes():
    check = ChangeCheck(torch.float32)
    sync(check, weights(), weights())
    sync(check, weights(0.1), weights(0.1, changed=0.02))


def test_nothing_is_asked_if_the_policy_stayed_or_its_change_is_lost_in_rounding():
    check = ChangeCheck(torch.bfloat16)
    sync(check, weights(), weights())
    sync(check, weights(), weights())
    sync(check, weights(1e-5, changed=0.5), weights())  # half of the distance between two bf16 numbers is 4e-3


def test_few_changes_prove_nothing():
    check = ChangeCheck(torch.float32)
    sync(check, weights(), weights())
    sync(check, weights(0.1, changed=0.02), weights())


def test_other_weights_are_not_compared():
    check = ChangeCheck(torch.float32)
    sync(check, weights(), weights())
    sync(check, {"a": torch.zeros(5000)}, weights())
