"""Groups stay together on a process, unless that makes one of them much dearer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_tools import responses

from rlx.config.schema import ModelConfig
from rlx.trainer.learning import QUADRATIC_TOKENS, RowTokens, balanced, cost

APART, SHARED = ModelConfig(use_shared_prefix=False).least_gain, ModelConfig().least_gain


def balance(batch, parts, gain):
    return batch.rows(balanced(batch, parts, gain))


def batch_of(groups, prompt=40, response=30):
    """Rows with these lengths of responses, group by group, and with their numbers as scores."""
    lengths = [length for group in groups for length in group]
    group_id = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    return responses(lengths, prompt, response, group_id=group_id, scores=torch.arange(len(lengths)).float())


def groups_of_parts(batch, sizes):
    return [sorted(part.tolist()) for part in batch["group_id"].split(sizes)]


GROUPS = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 6), st.sampled_from([APART, SHARED]))
def test_every_row_is_dealt(groups, parts, gain):
    batch = batch_of(groups)
    assert sorted(balance(batch, parts, gain)["scores"].tolist()) == batch["scores"].tolist()


@pytest.mark.parametrize(
    ("lengths", "shares"), [([8, 8, 1, 1], ([8, 1], [8, 1])), ([9, 8, 5, 4, 1], ([8, 4, 1], [9, 5])), ([3], ([3], []))]
)
def test_rows_are_dealt_evenly_in_equal_numbers(lengths, shares):
    dealt = balance(batch_of([[n] for n in lengths], 1, 9), 2, SHARED)
    counts = (dealt["attention_mask"].sum(dim=1) - 1).tolist()
    first = len(shares[0])
    assert (counts[:first], counts[first:]) == shares


def test_groups_stay_whole_and_are_dealt_evenly():
    batch = batch_of([[30] * 4, [1] * 4, [28] * 4, [2] * 4])
    found = groups_of_parts(balance(batch, 2, SHARED), [8, 8])
    assert sorted(found) == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]
    apart = groups_of_parts(balance(batch, 2, APART), [8, 8])
    assert all(len(set(part)) == 4 for part in apart), "rows that share nothing are dealt one by one"


def test_a_group_is_parted_where_one_process_would_take_much_longer():
    batch = batch_of([[30] * 4, [1] * 4], prompt=8)
    assert groups_of_parts(balance(batch, 2, SHARED), [4, 4]) == [[0, 0, 1, 1]] * 2


def test_three_processes_part_as_few_groups_as_their_rows_allow():
    parts = groups_of_parts(balance(batch_of([[9] * 6] * 4, prompt=200), 3, SHARED), [8, 8, 8])
    assert sorted(len(set(part)) for part in parts) == [2, 2, 2]


def test_prompts_that_save_little_keep_no_group_together():
    batch = batch_of([[30] * 2, [9] * 2, [29] * 2, [8] * 2], prompt=1)
    assert balance(batch, 2, SHARED)["scores"].tolist() == balance(batch, 2, APART)["scores"].tolist()


def test_a_prompt_costs_once():
    alone, both = [RowTokens(100, 20, 0)], [RowTokens(100, 20, 0), RowTokens(100, 30, 0)]
    assert cost(alone) == pytest.approx(120 * (1 + 120 / QUADRATIC_TOKENS))
    assert cost(both) - cost(alone) == pytest.approx(30 + (130**2 - 100**2) / QUADRATIC_TOKENS)
