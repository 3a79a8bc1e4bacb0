import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.cluster.mesh import Mesh, share_ranges


@given(st.integers(0, 200), st.integers(1, 40))
def test_shares_cover_all_rows_in_order_and_differ_by_one_at_most(rows, shares):
    ranges = share_ranges(rows, shares)
    assert [row for part in ranges for row in part] == list(range(rows))
    sizes = [len(part) for part in ranges]
    assert len(sizes) == shares and max(sizes) - min(sizes) <= 1


def test_neighbours_work_on_one_share_and_the_first_answers():
    assert Mesh.of(4) == Mesh((0, 1, 2, 3), (0, 1, 2, 3))
    assert Mesh.of(4, 2) == Mesh((0, 0, 1, 1), (0, 2))
    assert Mesh.of(4, 2).shares == 2


def test_a_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="6 processes cannot form groups of 4"):
        Mesh.of(6, 4)
