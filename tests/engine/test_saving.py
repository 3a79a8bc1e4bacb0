"""Host memory of saves: in advance, and for which tensors. Saves themselves are tested with engines, in test_checkpoint.py."""

import pytest
import torch

from rlx.checkpoint.tensors import pieces_of
from rlx.config.host_memory import HostMemory
from rlx.engine import host_offload, saving
from rlx.offload import HostArena

STATE = [torch.zeros(3 << 20, dtype=torch.uint8), torch.zeros(1000)]
NBYTES = (3 << 20) + 4000


@pytest.fixture
def reserved(monkeypatch):
    """reserved(limit) returns an arena of which saves have reserved what they can, 1 MiB at a time."""
    monkeypatch.setattr(saving, "RESERVED_AT_ONCE", 1 << 20)

    def make(limit=None):
        arena = HostArena(pinned=False)
        arena.limit(limit)
        saving.CheckpointWriter(arena, "actor", torch.device("cpu")).reserve(STATE)
        assert arena.held_bytes == 0, "others may use it until then"
        return arena

    return make


def test_a_save_finds_its_memory_reserved(reserved):
    arena = reserved()
    before = arena.allocations
    assert arena.reserved_bytes >= NBYTES
    assert arena.account().allocate(NBYTES) is not None and arena.allocations == before


def test_it_takes_what_the_limit_leaves(reserved):
    assert 1 << 20 <= reserved(5 << 19).reserved_bytes <= 5 << 19


def test_it_takes_nothing_where_memory_is_short(reserved, monkeypatch):
    monkeypatch.setattr(
        host_offload, "host_memory", lambda: HostMemory(available_bytes=20 << 20, total_bytes=100 << 20)
    )
    assert reserved().reserved_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_memory_is_read_in_place_and_nobody_waits_for_it(device):
    """Trained tensors are copied first, or if the device is another one, the optimizer waits until they are read."""
    frozen, trained = torch.zeros(6, 64), torch.zeros(64)
    pieces = {"model": pieces_of({"a": frozen[2:4], "b": trained, "c": frozen[4:]})}
    found, live = saving._find_all(pieces, [], torch.device(device), {frozen.untyped_storage()})
    in_place = {f.piece.name: f for f in found["model"]}
    for name, tensor in (("a", frozen[2:4]), ("c", frozen[4:])):
        assert in_place[name].live is None
        assert in_place[name].on_host[0].data_ptr() == tensor.data_ptr()
    assert (in_place["b"].on_host is None) == (device == "cpu")
    assert len(live) == (device != "cpu")
