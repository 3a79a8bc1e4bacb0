import pytest
import ray

from rlx.cluster import placement
from rlx.cluster.placement import Placement, PlacementError, Slot

pytestmark = pytest.mark.usefixtures("ray_session")


def test_cpu_processes_may_outnumber_the_cores():
    pool = Placement.reserve(1, 40, "cpu")
    assert pool.slots == tuple(Slot(0, local_rank) for local_rank in range(40))
    pool.release()


@pytest.mark.parametrize(
    ("nnodes", "device", "asked"),
    [(2, "cpu", "2 node(s) with 1 CPU process(es) each"), (1, "cuda", "1 node(s) with 99 GPU(s) each")],
)
def test_too_little_room_says_what_is_asked_and_what_there_is(nnodes, device, asked, monkeypatch):
    monkeypatch.setattr(placement, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(placement, "_WAIT_S", 0.5)
    with pytest.raises(PlacementError) as caught:
        Placement.reserve(nnodes, 99 if device == "cuda" else 1, device)
    text = str(caught.value)
    assert asked in text and "1 node(s)" in text
    assert f"{ray.cluster_resources()['CPU']:g} CPUs" in text
    assert "trainer.nnodes" in text
