"""Host memory that saves take in advance. Saves themselves are tested with engines, in test_checkpoint.py."""

import pytest
import torch

from rlx.config.host_memory import HostMemory
from rlx.engine import residency, saving
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
        saving.Saves(arena, "actor", torch.device("cpu")).reserve(STATE)
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
    monkeypatch.setattr(residency, "host_memory", lambda: HostMemory(available_bytes=20 << 20, total_bytes=100 << 20))
    assert reserved().reserved_bytes == 0
