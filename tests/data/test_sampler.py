import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.data.files import DataError
from rlx.data.prompts import PromptSampler

sizes = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(sizes, st.booleans(), st.integers(0, 5), st.integers(0, 30), st.integers(1, 10))
def test_resumes_exactly(size_batch, shuffle, seed, before, after):
    size, batch_size = size_batch
    whole = PromptSampler(size, batch_size, shuffle, seed)
    for _ in range(before):
        whole.next()
    resumed = PromptSampler(size, batch_size, shuffle, seed)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.epoch == whole.epoch
    assert [resumed.next() for _ in range(after)] == [whole.next() for _ in range(after)]


@given(sizes, st.integers(0, 5))
def test_an_epoch_has_no_prompt_twice_and_drops_its_ragged_end(size_batch, seed):
    size, batch_size = size_batch
    sampler = PromptSampler(size, batch_size, True, seed)
    for epoch in range(3):
        assert sampler.epoch == epoch
        drawn = [i for _ in range(sampler.batches_per_epoch) for i in sampler.next()]
        assert len(drawn) == size // batch_size * batch_size
        assert len(set(drawn)) == len(drawn) and set(drawn) <= set(range(size))


def test_order():
    assert PromptSampler(5, 2, False, 0).next() == [0, 1]
    sampler = PromptSampler(100, 100, True, 0)
    first, second = sampler.next(), sampler.next()
    assert first != sorted(first) and first != second
    assert first == PromptSampler(100, 100, True, 0).next()
    assert first != PromptSampler(100, 100, True, 1).next()


def test_order_never_changes():
    # A run resumed by a later version must see the same prompts.
    assert PromptSampler(8, 8, True, 1).next() == [3, 4, 5, 2, 0, 6, 7, 1]


@pytest.mark.parametrize("batch_size", [0, 6])
def test_batch_that_does_not_fit(batch_size):
    with pytest.raises(DataError, match=rf"train_batch_size: got {batch_size} with 5 prompts"):
        PromptSampler(5, batch_size, True, 0)


@pytest.mark.parametrize("other", [(11, 2, True, 0), (10, 2, False, 0), (10, 2, True, 1)])
def test_state_of_another_order_is_refused(other):
    with pytest.raises(DataError, match="cannot continue in the same order"):
        PromptSampler(*other).load_state_dict(PromptSampler(10, 2, True, 0).state_dict())


def test_batch_size_may_change_on_resume():
    sampler = PromptSampler(10, 2, True, 0)
    drawn = sampler.next()
    resumed = PromptSampler(10, 4, True, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert not set(resumed.next()) & set(drawn)


def test_other_rows_of_the_same_number_are_refused():
    state = PromptSampler(9, 2, True, 0, "digest").state_dict()
    PromptSampler(9, 2, True, 0, "digest").load_state_dict(state)
    PromptSampler(9, 2, True, 0).load_state_dict(state)  # of a class of the user's own
    with pytest.raises(DataError, match="the training rows differ from those of the checkpoint"):
        PromptSampler(9, 2, True, 0, "another").load_state_dict(state)
    del state["rows"]  # a checkpoint of before
    PromptSampler(9, 2, True, 0, "another").load_state_dict(state)
