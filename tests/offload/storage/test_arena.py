import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.offload.storage.arena import HostArena

MIB = 1 << 20


class Later:
    """An event that passes when told to, or when waited for."""

    def __init__(self):
        self.passed = False
        self.waited = 0

    def query(self):
        return self.passed

    def synchronize(self):
        self.waited += 1
        self.passed = True


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 24), min_size=2, max_size=40), seed=st.integers(0, 1 << 16))
def test_lengths_below_the_longest_seen_reserve_no_more(lengths, seed):
    """Steps of tensors as long as the step is: once the longest has run, no other asks the system for memory."""
    arena = HostArena(pinned=False)
    account = arena.account()

    def step(length):
        blocks = [account.allocate(length * 100_000 + layer) for layer in range(6)]
        held = account.held_bytes
        for block in blocks[seed % 6 :] + blocks[: seed % 6]:
            account.free(block)
        return held

    largest = step(max(lengths))
    reserved, allocations = arena.reserved_bytes, arena.allocations
    assert reserved <= 2 * largest + 2 * MIB  # small amounts; test_ranges.py has the large ones
    for length in lengths:
        step(length)
    assert (arena.reserved_bytes, arena.allocations) == (reserved, allocations)
    assert account.held_bytes == arena.held_bytes == 0


def test_a_block_holds_what_was_written_to_it_over_several_pieces():
    arena = HostArena(pinned=False)
    arena.limit(6 * MIB)
    account = arena.account()
    parts = [account.allocate(MIB) for _ in range(6)]
    for part in parts[::2]:
        account.free(part)
    kept = parts[1::2]
    for number, part in enumerate(kept):
        part.views[0].fill_(number)
    reserved = arena.reserved_bytes
    block = account.allocate(3 * MIB - 7)
    assert arena.reserved_bytes == reserved  # laid over the gaps
    assert sum(view.numel() for view in block.views) == block.nbytes
    for view in block.views:
        view.fill_(99)
    assert all(bool((part.views[0] == number).all()) for number, part in enumerate(kept))


def test_a_cap_is_never_passed_and_counts_what_is_held():
    arena = HostArena(pinned=False)
    account = arena.account(max_bytes=3 * MIB)
    blocks = [account.allocate(MIB) for _ in range(4)]
    assert blocks[3] is None
    assert arena.reserved_bytes <= 3 * MIB
    assert account.held_bytes == 3 * MIB
    account.free(blocks[0])
    assert account.allocate(MIB) is not None
    assert arena.reserved_bytes <= 3 * MIB


def test_the_arena_says_who_holds_what():
    arena = HostArena(pinned=False)
    one, other, unnamed = arena.account(name="one"), arena.account(name="one"), arena.account()
    blocks = [one.allocate(MIB), other.allocate(2 * MIB), unnamed.allocate(100)]
    assert arena.holders() == {"one": 3 * MIB, "others": 100}
    other.free(blocks[1])
    assert arena.holders()["one"] == MIB
    del one, other
    gc.collect()
    assert arena.holders() == {"others": 100}


def test_a_cap_for_all_holds_whatever_the_accounts_may():
    arena = HostArena(pinned=False)
    arena.limit(3 * MIB)
    one, two = arena.account(), arena.account(max_bytes=10 * MIB)
    first = one.allocate(2 * MIB)
    assert two.allocate(2 * MIB) is None
    assert two.allocate(MIB) is not None
    assert arena.reserved_bytes == 3 * MIB
    one.free(first)
    assert two.allocate(2 * MIB) is not None
    arena.limit(None)
    assert one.allocate(8 * MIB) is not None
    with pytest.raises(ValueError, match="-1 bytes"):
        arena.limit(-1)


def test_a_block_that_a_copy_still_reads_is_waited_for_rather_than_handed_on():
    arena = HostArena(pinned=False)
    account = arena.account()
    block, copy = account.allocate(2 * MIB), Later()
    account.free(block, copy)
    assert account.held_bytes == 0
    assert arena.held_bytes == 2 * MIB
    copy.passed = True
    assert arena.held_bytes == 0
    block, copy, allocations = account.allocate(2 * MIB), Later(), arena.allocations
    account.free(block, copy)
    again = account.allocate(2 * MIB)  # a steady step asks for no memory
    assert (again.extents, copy.waited, arena.allocations) == (block.extents, 1, allocations)
    account.free(again, copy := Later())
    assert arena.trim() > 0
    assert (copy.waited, arena.reserved_bytes) == (1, 0)


def test_trim_gives_back_what_is_free():
    arena = HostArena(pinned=False)
    account = arena.account()
    one, two = account.allocate(40 * MIB), account.allocate(48 * MIB)
    account.free(one)
    reserved = arena.reserved_bytes
    assert arena.trim() == 40 * MIB
    assert arena.reserved_bytes == reserved - 40 * MIB
    two.views[0].fill_(1)
    account.free(two)
    arena.trim()
    assert arena.reserved_bytes == 0
    assert account.allocate(MIB) is not None


def test_memory_that_the_system_refuses_is_no_crash(caplog):
    arena = HostArena(pinned=False)
    account = arena.account()
    for _ in range(2):
        assert account.allocate(1 << 60) is None  # more than any machine has
    assert caplog.text.count("no host memory left") == 1
    assert account.allocate(MIB) is not None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="page-locked memory can be had here")
def test_page_locked_memory_that_is_refused_becomes_pageable_with_one_warning(caplog):
    arena = HostArena(pinned=True)
    account = arena.account()
    assert account.allocate(MIB) is not None
    assert account.allocate(8 * MIB) is not None
    assert len([r for r in caplog.records if "page-lock" in r.getMessage()]) == 1
