import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.data.batch import partition

COSTS = st.lists(st.integers(0, 50), max_size=20)


def dearest(costs, parts):
    return max(sum(costs[item] for item in part) for part in parts)


@given(COSTS, st.integers(1, 6), st.integers(0, 3))
def test_each_item_comes_once_and_room_is_kept(costs, parts, spare):
    room = [len(costs) // parts + (part < len(costs) % parts) + spare for part in range(parts)]
    for found in (partition(costs, parts), partition(costs, parts, room)):
        assert len(found) == parts and sorted(item for part in found for item in part) == list(range(len(costs)))
        assert found == [sorted(part) for part in found]
    assert all(len(part) <= most for part, most in zip(found, room, strict=True))


def test_exchanges_find_what_longest_first_misses():
    assert sorted(partition([3, 3, 2, 2, 2], 2)) == [[0, 1], [2, 3, 4]]
    assert dearest([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2, [3, 2])) == 15


@pytest.mark.parametrize("parts", [4, 8])
def test_random_lengths_are_within_one_percent(parts):
    source = random.Random(0)
    for _ in range(20):
        costs = [source.randint(50, 2000) for _ in range(16 * parts)]
        found = partition(costs, parts, [16] * parts)
        assert dearest(costs, found) <= 1.01 * sum(costs) / parts
