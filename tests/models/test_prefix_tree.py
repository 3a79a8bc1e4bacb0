from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.models.prefix_tree import NEVER, ROOT, Span, Tree, tree_of_rows

TWO_GROUPS = Tree([4, 2, 3, 1, 5, 7], [ROOT, ROOT, 0, 0, 1, ROOT])
FORKS = Tree([3, 2, 4, 1], [ROOT, 0, 0, 1])


def test_positions_continue_those_of_the_parent():
    assert FORKS.positions().tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 5] and FORKS.longest == 7
    assert Tree([2, 3]).positions().tolist() == [0, 1, 0, 1, 2]


def test_padding_is_a_root_at_the_end():
    padded = FORKS.with_padding(2)
    assert padded.lengths == [3, 2, 4, 1, 2] and padded.parents[-1] == ROOT and padded.padding == 2
    assert FORKS.with_padding(0) is FORKS


def test_a_prompt_and_its_responses_need_two_reads():
    own, prefix = Tree([5, 3, 4], [ROOT, 0, 0]).reads()
    assert [pair.queries == pair.keys for pair in own.pairs] == [True] * 3 and own.is_causal and not own.adds
    assert prefix.pairs == [((Span(5, 12),), (Span(0, 5),))] and prefix.adds and not prefix.is_causal


def seen_by(tree, window=None, copied=0):
    """Which tokens each token sees, by its reads; no pair may be seen twice."""
    seen = torch.zeros(tree.starts[-1], tree.starts[-1], dtype=torch.int64)
    for read in tree.reads(window, copied):
        for queries, keys in read.pairs:
            rows, columns = (torch.cat([torch.arange(*span) for span in spans]) for spans in (queries, keys))
            behind = torch.arange(len(columns) - len(rows), len(columns))[:, None] - torch.arange(len(columns))
            visible = (behind >= 0) & (behind < (window or len(columns))) if read.is_causal else behind == behind
            seen[rows[:, None], columns] += visible.long()
    return seen


def path_of(tree, segment):
    return torch.cat([torch.arange(*tree.span(each)) for each in (*tree.ancestors(segment), segment)])


@pytest.mark.parametrize("copied", [0, 2, 3, 100])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("tree", [TWO_GROUPS, FORKS, FORKS.with_padding(2), TWO_GROUPS.cut(2, 4)])
def test_reads_show_each_token_its_path_once(tree, window, copied):
    expected = torch.zeros(tree.starts[-1], tree.starts[-1], dtype=torch.int64)
    for segment in range(len(tree.lengths)):
        path = path_of(tree, segment)
        for place in range(len(path) - tree.lengths[segment], len(path)):
            expected[path[place], path[max(0, place + 1 - (window or place + 1)) : place + 1]] = 1
    assert torch.equal(seen_by(tree, window, copied), expected)


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 100])
def test_a_cut_keeps_tokens_and_positions(multiple):
    cut = TWO_GROUPS.cut(multiple, 6)
    assert cut.starts[-1] == TWO_GROUPS.starts[-1] and torch.equal(cut.positions(), TWO_GROUPS.positions())
    inner = {parent for parent in cut.parents if parent != ROOT}
    assert all(cut.lengths[segment] % multiple == 0 or cut.lengths[segment] < multiple for segment in inner)


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


@given(ROWS, st.sampled_from([0.0, 0.03, 0.3, NEVER]))
def test_every_row_is_a_path_of_its_tree(rows, least_gain):
    rows = [torch.tensor(row) for row in rows]
    tree, pieces, places = tree_of_rows(rows, least_gain)
    tokens = torch.cat([rows[row][slice(*columns)] for row, columns in pieces])
    positions, ends = tree.positions(), dict(zip(tree.starts[1:], range(len(tree.lengths)), strict=True))
    for row, own in zip(rows, places, strict=True):
        assert torch.equal(tokens[own], row) and torch.equal(positions[own], torch.arange(len(row)))
        assert torch.equal(path_of(tree, ends[int(own[-1]) + 1]), own)
    if least_gain == NEVER:
        assert tree.is_flat and tree.lengths == [len(row) for row in rows]
    if least_gain == 0:
        beginnings = {tuple(row[: n + 1].tolist()) for row in rows for n in range(len(row))}
        assert tree.starts[-1] == len(beginnings), "no token is there twice"


def test_a_beginning_that_saves_too_little_is_not_shared():
    prompt, system = torch.arange(100), torch.arange(200, 260)
    rows = [torch.cat([system, prompt, torch.tensor([n] * 20)]) for n in range(3)]
    rows += [torch.cat([system, prompt + 500, torch.tensor([7] * 2 + [n] * 18)]) for n in range(2)]
    tree, *_ = tree_of_rows(rows, least_gain=0.15)
    assert tree.lengths == [60, 100, 102, 20, 20, 20, 18, 18] and tree.parents == [ROOT, 0, 0, 1, 1, 1, 2, 2]
    tree, *_ = tree_of_rows(rows, least_gain=0.5)
    assert tree.lengths == [160, 180, 180, 20, 20, 20] and tree.parents == [ROOT, ROOT, ROOT, 0, 0, 0]


def test_the_queries_and_the_keys_of_groups_are_neighbours():
    prompts = [torch.full((4,), n) for n in range(2)]
    rows = [torch.tensor([9, 9])] + [torch.cat([prompts[n % 2], torch.tensor([5, n])]) for n in range(4)]
    rows = [torch.cat([row, torch.tensor([n])]) for n, row in enumerate(rows)]
    tree, *_ = tree_of_rows(rows, 0.0)
    _, prefix = tree.reads()
    for spans in zip(*prefix.pairs, strict=True):
        assert all(one[-1].stop == other[0].first for one, other in pairwise(spans))
