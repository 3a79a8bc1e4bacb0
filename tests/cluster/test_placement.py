import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from rlx.cluster import placement
from rlx.cluster.placement import Mesh, Placement, PlacementError, Slot, nodes_to_take, share_ranges

IN_RAY = pytest.mark.usefixtures("ray_session")


@IN_RAY
@pytest.mark.parametrize(("wanted", "least", "taken"), [(1, 1, 1), (4, 1, 1), (4, 2, 2)])
def test_a_run_takes_the_nodes_that_answer_but_not_too_few(wanted, least, taken):
    """With too few the reservation fails and says so."""
    assert nodes_to_take(wanted, least, gpus=0, wait_s=0.1) == taken


@IN_RAY
def test_cpu_processes_may_outnumber_the_cores():
    pool = Placement.reserve(1, [40], "cpu")
    assert pool.slots == tuple(Slot(0, local_rank) for local_rank in range(40))
    pool.release()


@IN_RAY
@pytest.mark.parametrize(
    ("nnodes", "device", "asked"),
    [(2, "cpu", "2 node(s) with 1 CPU process(es) each"), (1, "cuda", "1 node(s) with 100 GPU(s) each")],
)
def test_too_little_room_says_what_is_asked_and_what_there_is(nnodes, device, asked, monkeypatch):
    monkeypatch.setattr(placement, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(placement, "_WAIT_S", 0.5)
    with pytest.raises(PlacementError) as caught:
        Placement.reserve(nnodes, (1, 99) if device == "cuda" else [1], device)
    text = str(caught.value)
    assert asked in text and "1 node(s)" in text
    assert f"{ray.cluster_resources()['CPU']:g} CPUs" in text
    assert "trainer.nnodes" in text and ("trainer.n_rollout_gpus" in text) == (device == "cuda")


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
