import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.data.batch import Batch
from rlx.engine.micro_batches import (
    MicroBatchRule,
    RowLength,
    divide,
    groups_of,
    pack,
    row_lengths,
    shifted,
    take,
    unique_tokens,
)

LENGTHS = st.lists(st.builds(RowLength, st.integers(0, 20), st.integers(0, 20)), max_size=12)


@given(LENGTHS, st.integers(1, 5), st.booleans(), st.integers(0, 15))
def test_by_rows_each_row_comes_once_and_no_part_is_too_large(lengths, rows, packs, at_least):
    parts = divide(lengths, MicroBatchRule(rows=rows), packs, at_least)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert max((len(part) for part in parts), default=0) <= rows
    assert len(parts) == max(at_least, -(-len(lengths) // rows))


@given(LENGTHS, st.integers(1, 80), st.booleans(), st.integers(0, 15))
def test_by_tokens_no_part_computes_more_unless_it_is_one_row(lengths, tokens, packs, at_least):
    parts = divide(lengths, MicroBatchRule(tokens=tokens), packs, at_least)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) >= at_least
    for part in parts:
        each = [sum(lengths[row]) for row in part]
        computed = sum(each) if packs else len(part) * max(each, default=0)
        assert computed <= tokens or len(part) == 1


def test_packed_micro_batches_are_few_and_alike_and_the_largest_comes_first():
    lengths = [RowLength(1, n) for n in (9, 1, 5, 5, 3, 7, 1, 1)]
    loads = [sum(sum(lengths[row]) for row in part) for part in divide(lengths, MicroBatchRule(tokens=20), packs=True)]
    assert loads == [20, 20]
    assert [len(part) for part in divide(lengths, MicroBatchRule(rows=4), packs=True)] == [4, 4]
    parts = divide(lengths, MicroBatchRule(tokens=100), packs=True, at_least=3)
    assert [sum(sum(lengths[row]) for row in part) for part in parts] == [14, 14, 12]


GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 20), min_size=1, max_size=5)), max_size=4)


def rows_of(groups):
    """The lengths of all rows, and the numbers of the rows of each group."""
    lengths = [RowLength(prompt, response) for prompt, responses in groups for response in responses]
    numbers = iter(range(len(lengths)))
    return lengths, [[next(numbers) for _ in responses] for _, responses in groups]


def computed(part, groups, lengths):
    return sum(unique_tokens([row for row in group if row in part], lengths) for group in groups)


@given(GROUPS, st.integers(1, 60), st.integers(0, 15))
def test_of_groups_unique_tokens_count(groups, tokens, at_least):
    lengths, groups = rows_of(groups)
    parts = divide(lengths, MicroBatchRule(tokens=tokens), True, at_least, groups)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) >= at_least
    assert all(computed(part, groups, lengths) <= tokens or len(part) == 1 for part in parts)


@given(GROUPS, st.integers(1, 6), st.integers(0, 15))
def test_of_groups_no_more_rows_are_together_than_asked_for(groups, rows, at_least):
    lengths, groups = rows_of(groups)
    parts = divide(lengths, MicroBatchRule(rows=rows), True, at_least, groups)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert max((len(part) for part in parts), default=0) <= rows and len(parts) >= at_least


def test_groups_stay_together_as_far_as_the_limit_allows():
    lengths, groups = rows_of([(50, [5] * 4), (40, [5] * 4), (10, [5] * 2)])
    whole = divide(lengths, MicroBatchRule(tokens=90), True, 0, groups)
    assert sorted(whole) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert sorted(map(len, divide(lengths, MicroBatchRule(tokens=60), True, 0, groups))) == [2, 2, 2, 4], "50 + 2 x 5"
    assert sorted(divide(lengths, MicroBatchRule(rows=4), True, 0, groups)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(divide(lengths, MicroBatchRule(tokens=1000), True, 12, groups)) == 12, "the processes agreed on more"


def test_rows_with_equal_prompts_are_a_group_if_that_pays():
    ids = torch.tensor([[0, 7, 7, 1], [0, 7, 7, 2], [7, 7, 7, 3], [0, 7, 7, 4], [0, 8, 7, 5]])
    ones = torch.ones(5, 1, dtype=torch.bool)
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1]]).bool()
    rows = Batch.of({"input_ids": ids, "attention_mask": torch.cat([mask, ones], dim=1), "response_mask": ones})
    lengths = row_lengths(rows)
    assert groups_of(rows, lengths, 0.0) == [[0, 1, 3], [2], [4]]
    assert groups_of(rows, lengths, 4 / 9) == [[0], [1], [3], [2], [4]], "it saves no more than 4 of 9 tokens"


def test_a_group_has_its_prompt_once_and_reads_its_last_token_for_each_response():
    ids = torch.tensor([[5, 6, 1, 2], [5, 6, 3, 4], [5, 6, 1, 9]])
    mask = torch.ones(3, 4, dtype=torch.bool)
    rows = Batch.of({"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 2:]})
    packed = pack(rows, [0, 1, 2], row_lengths(rows), least_gain=0.0).packed
    assert packed.input_ids.tolist() == [[5, 6, 1, 3]] and packed.position_ids.tolist() == [[0, 1, 2, 2]]
    assert packed.tree.lengths == [2, 1, 1] and packed.starts.tolist() == [0, 2, 3, 4]
    assert packed.predicting.tolist() == [1, 2, 1, 3, 1, 2] and packed.targets.tolist() == [[1, 2, 3, 4, 1, 9]]


def batch() -> Batch:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0]]).bool()
    return Batch.of(
        {
            "input_ids": torch.arange(21).view(3, 7),
            "attention_mask": mask,
            "response_mask": mask[:, 4:],
            "advantages": torch.arange(9.0).view(3, 3),
        }
    )


def test_row_lengths_count_from_the_first_prompt_to_the_last_response_token():
    assert row_lengths(batch()) == [RowLength(2, 1), RowLength(3, 2), RowLength(1, 0)]


def test_rows_start_with_their_prompt_and_end_with_padding_only():
    rows, taken, lead, _ = take(batch(), [2, 0, 1], row_lengths(batch()))
    assert rows == [2, 0, 1] and lead.tolist() == [0, 1, 2]
    mask = taken["attention_mask"]
    assert mask.tolist() == [[True] * 1 + [False] * 4, [True] * 3 + [False] * 2, [True] * 5]
    assert (taken["input_ids"] * mask).tolist() == [[17, 0, 0, 0, 0], [2, 3, 4, 0, 0], [8, 9, 10, 11, 12]]


def test_the_window_holds_every_response_and_its_columns():
    _, taken, lead, _ = take(batch(), [2, 0, 1], row_lengths(batch()))
    assert taken["response_mask"].tolist() == [[False] * 4, [False, True, False, False], [False, False, True, True]]
    assert (taken["advantages"] * taken["response_mask"]).tolist() == [[0] * 4, [0, 0, 0, 0], [0, 0, 3, 4]]
    assert (taken.responses() * taken["response_mask"]).tolist() == [[0] * 4, [0, 4, 0, 0], [0, 0, 11, 12]]
    back = shifted(taken["advantages"], lead, 3)
    assert torch.equal(back[2, :2], batch()["advantages"][1, :2])


def test_packed_rows_follow_each_other_without_padding_and_without_their_last_token():
    rows, taken, lead, packed = pack(batch(), [2, 0, 1], row_lengths(batch()))
    assert rows == [2, 0, 1] and lead.tolist() == [0, 0, 0]
    assert packed.input_ids.tolist() == [[17, 2, 3, 8, 9, 10, 11]], (
        "of the empty row its prompt, and no column of padding"
    )
    assert packed.position_ids.tolist() == [[0, 0, 1, 0, 1, 2, 3]]
    assert (
        packed.starts.tolist() == [0, 1, 3, 7]
        and packed.starts.dtype == torch.int32
        and packed.tree.lengths == [1, 2, 4]
    )
    # Each response token is predicted from the token before it, and stands in its own column of the window.
    assert packed.predicting.tolist() == [0, 2, 5, 6]
    assert packed.targets.tolist() == [[18, 4, 11, 12]]
    assert packed.places.tolist() == [0, 2, 4, 5]
    assert taken["response_mask"].tolist() == [[False, False], [True, False], [True, True]]
    assert taken["advantages"].tolist() == [[6, 7], [0, 1], [3, 4]]


def with_experts(rows: Batch, layers: int = 2) -> Batch:
    """Experts that are numbers of their tokens, the second of the last layer 7 for all."""
    experts = rows["input_ids"][:, :, None, None].repeat(1, 1, layers, 2)
    experts[..., -1, 1] = 7
    return rows.with_(routed_experts=experts.to(torch.uint8))


def test_experts_lie_beside_their_tokens():
    rows = with_experts(batch())
    taken = take(rows, [2, 0, 1], row_lengths(rows)).batch
    found = taken["routed_experts"] * taken["attention_mask"][:, :, None, None]
    assert found[..., 0, 0].tolist() == (taken["input_ids"] * taken["attention_mask"]).tolist()
    _, left, _, packed = pack(rows, [2, 0, 1], row_lengths(rows))
    assert "routed_experts" not in left
    assert packed.experts[:, 0, 0].tolist() == packed.input_ids[0].tolist() and (packed.experts[:, 1, 1] == 7).all()
    assert packed.copies.tolist() == [0, 1, 1, 1, 1, 1, 1], "the empty row predicts nothing"
    for empty in (take(rows, [], []).batch["routed_experts"], pack(rows, [], []).packed.experts):
        assert empty.shape[-2:] == (2, 2) and not empty.any()


def test_prompts_are_shared_where_their_experts_are_equal():
    ids = torch.tensor([[5, 6, 1, 2], [5, 6, 3, 4], [5, 6, 1, 9]])
    mask = torch.ones(3, 4, dtype=torch.bool)
    rows = with_experts(Batch.of({"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 2:]}))
    packed = pack(rows, [0, 1, 2], row_lengths(rows), least_gain=0.0).packed
    assert packed.input_ids.tolist() == [[5, 6, 1, 3]] and packed.copies.tolist() == [3, 3, 2, 1]
    assert groups_of(rows, row_lengths(rows), 0.0) == [[0, 1, 2]]
    rows["routed_experts"][1, 1, 1, 0] = 3
    packed = pack(rows, [0, 1, 2], row_lengths(rows), least_gain=0.0).packed
    assert packed.copies.tolist() == [3, 2, 2, 1, 1], "the first token alone is that of all rows"
    assert packed.experts[:, 1, 0].tolist() == [5, 6, 1, 3, 3]
    assert groups_of(rows, row_lengths(rows), 0.0) == [[0, 2], [1]]
