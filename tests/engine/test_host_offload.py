"""Tensors in host memory, and when that is given back: only if it is short, of the machine or of the container."""

import gc
import logging
import pickle
from concurrent.futures import Future

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.config.host_memory import HostMemory, all_host_bytes, host_memory
from rlx.engine.host_offload import HandOverError, HostRelief, TensorOffload, host_use
from rlx.offload import HostArena, host_arena

MIB = 1 << 20


def tensors(*lengths: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(256, (length,), dtype=torch.uint8, generator=g) for length in lengths]


def test_offloaded_tensors_give_their_memory_back_and_return_as_they_were():
    whole = torch.arange(6.0)
    view, other = whole[2:4], torch.ones(3, dtype=torch.int32)
    arena = HostArena(pinned=False)
    offload = TensorOffload(arena, "some")
    offload.fetch()
    assert not offload.is_offloaded, "nothing to bring back is no fault"
    offload.offload([view, whole, other, torch.empty(0)])
    assert offload.is_offloaded
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert arena.holders() == {"some": 6 * 4 + 3 * 4}
    offload.fetch()
    assert not offload.is_offloaded and arena.holders() == {"some": 0}
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and view.tolist() == [2, 3] and other.tolist() == [1, 1, 1]
    view.add_(1)
    assert whole.tolist() == [0, 1, 3, 4, 4, 5], "views still share the storage"


def test_memory_that_torch_did_not_allocate_stays():
    foreign = torch.frombuffer(bytearray(range(8)), dtype=torch.uint8)
    offload = TensorOffload(HostArena(pinned=False), "some")
    offload.offload([foreign])
    assert not offload.is_offloaded and foreign.tolist() == list(range(8))


@given(
    lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=12),
    gaps=st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_bytes_survive_in_whatever_pieces_the_arena_has(lengths, gaps):
    arena = HostArena(pinned=False)
    other = arena.account()
    blocks = [other.allocate(gap * 4096) for gap in gaps]
    for block in blocks[::2]:
        other.free(block)
    given = tensors(*lengths)
    expected = [tensor.clone() for tensor in given]
    offload = TensorOffload(arena, "some")
    offload.offload(given)
    offload.fetch()
    assert all(torch.equal(tensor, was) for tensor, was in zip(given, expected, strict=True))


def test_every_cycle_after_the_first_takes_no_memory_and_shares_that_of_activations():
    arena = HostArena(pinned=False)
    parameters, state = TensorOffload(arena, "parameters"), TensorOffload(arena, "state")
    weights, moments = tensors(3 * MIB, 70_001, 5 * MIB), tensors(6 * MIB, 140_002, 4)
    activations = arena.account(name="activations")

    def cycle() -> tuple[int, int]:
        blocks = [activations.allocate(n) for n in (4 * MIB, 4 * MIB, 9 * MIB)]  # an update's, held at the same time
        of_activations = arena.reserved_bytes
        for block in blocks:
            activations.free(block)
        parameters.offload(weights)
        state.offload(moments)
        assert arena.holders() == {"parameters": 8 * MIB + 70_001, "state": 6 * MIB + 140_006, "activations": 0}
        assert arena.reserved_bytes == of_activations
        parameters.fetch()
        state.fetch()
        return arena.reserved_bytes, arena.allocations

    first = cycle()
    assert cycle() == cycle() == first


def test_a_host_without_room_is_named_and_nothing_is_lost(monkeypatch):
    arena = HostArena(pinned=False)
    activations = arena.account(name="activations")
    activations.allocate(160 * MIB)
    tensor, offload = torch.ones(300 * MIB, dtype=torch.bool), TensorOffload(arena, "actor_parameters")
    message = r"actor_parameters: got 0\.31 GB .* has 0\.25 GB.*\(activations 0\.17 GB\).*param_offload"
    for cause in ("limit", "available"):
        if cause == "limit":
            arena.limit(400 * MIB)
        else:
            arena.limit(None)
            monkeypatch.setattr("rlx.engine.host_offload.host_memory", lambda: HostMemory(240 * MIB, 1 << 40))
        with pytest.raises(HandOverError, match=message) as found:
            offload.offload([tensor])
        assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)
        assert not offload.is_offloaded and tensor.nbytes == tensor.untyped_storage().nbytes() and bool(tensor.all())
    assert activations.held_bytes == 160 * MIB
    monkeypatch.setattr("rlx.engine.host_offload.host_memory", lambda: HostMemory(300 * MIB, 1 << 40))
    offload.offload([tensor])
    assert offload.is_offloaded, "with room it goes on"


def test_a_device_without_room_is_named_and_what_waits_goes_on_waiting():
    offload, (tensor, other) = TensorOffload(HostArena(pinned=False), "actor_parameters"), tensors(MIB, 100)
    expected = tensor.clone()
    offload.offload([tensor, other])
    room = offload._offloaded
    offload._offloaded = room._replace(lengths=[MIB, 1 << 62])
    with pytest.raises(
        HandOverError, match=r"actor_parameters: no device memory to fetch 0\.00 GB.*gpu_memory_utilization"
    ):
        offload.fetch()
    assert offload.is_offloaded and tensor.untyped_storage().nbytes() == 0, "nothing is half back"
    offload._offloaded = room
    offload.fetch()
    assert torch.equal(tensor, expected)


def test_the_memory_of_a_forgotten_offload_is_free():
    arena = HostArena(pinned=False)
    offload = TensorOffload(arena, "some")
    offload.offload(tensors(MIB))
    assert arena.held_bytes == MIB
    del offload
    gc.collect()
    assert arena.held_bytes == 0


def test_a_lent_block_stays_until_the_reader_has_ended():
    arena, reader = HostArena(pinned=False), Future()
    (tensor,) = tensors(3 * MIB)
    before, offload = tensor.clone(), TensorOffload(arena, "state")
    offload.offload([tensor])
    (lent,) = offload.host_bytes(0, 3 * MIB)
    offload.keep_until(reader)
    offload.fetch()
    tensor.add_(1)
    offload.offload([tensor])
    assert torch.equal(lent, before) and arena.holders() == {"state": 6 * MIB}
    reader.set_result(None)
    assert arena.holders() == {"state": 3 * MIB}
    offload.fetch()
    assert torch.equal(tensor, before + 1)


SHORT, PLENTY = HostMemory(19, 100), HostMemory(20, 100)


@pytest.fixture
def reserved():
    """An arena that keeps 8 MiB, of which nothing is in use."""
    arena = host_arena(False)
    arena.trim()
    account = arena.account()
    account.free(account.allocate(8 * MIB))
    assert arena.held_bytes == 0 and arena.reserved_bytes >= 8 * MIB
    yield arena
    arena.trim()


def test_free_memory_is_given_back_when_memory_is_short_and_told_once(reserved, caplog):
    caplog.set_level(logging.INFO, "rlx")
    relief, bytes_before = HostRelief(), reserved.reserved_bytes
    assert relief.relieve(PLENTY) == 0 and reserved.reserved_bytes == bytes_before
    assert relief.relieve(SHORT) == bytes_before and reserved.reserved_bytes == 0
    account = reserved.account()
    account.free(account.allocate(MIB))
    assert relief.relieve(SHORT) >= MIB
    (record,) = caplog.records
    assert "host memory is short" in record.getMessage() and "max_host_bytes" in record.getMessage()


def test_who_keeps_what_on_the_host_is_told_of_both_kinds_of_memory(reserved):
    account, other = reserved.account(name="actor_parameters"), host_arena(True).account(name="nobody")
    block = account.allocate(MIB)
    use = host_use()
    assert use["actor_parameters"] == MIB and other.held_bytes == 0 and "nobody" not in use
    assert use["reserved"] == reserved.reserved_bytes + host_arena(True).reserved_bytes
    account.free(block)


def test_without_a_container_the_machine_counts(tmp_path):
    found = host_memory(tmp_path)
    assert found.total_bytes == all_host_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < found.available_bytes <= found.total_bytes


@pytest.mark.parametrize(
    ("limit", "usage", "stat"),
    [
        ("memory.max", "memory.current", "anon 1\ninactive_file 100\n"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "cache 7\ninactive_file 1\ntotal_inactive_file 100\n",
        ),
    ],
)
def test_the_container_counts_where_less_is_left_without_its_file_cache(tmp_path, limit, usage, stat):
    (tmp_path / "memory").mkdir()
    for name, text in (
        (limit, "1000\n"),
        (usage, "950\n"),
        (str(tmp_path / limit).rpartition("/")[0] + "/memory.stat", stat),
    ):
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == HostMemory(150, 1000)
    assert host_memory(tmp_path).is_short
    assert all_host_bytes(tmp_path) == 1000
    for unlimited in ("max", str(2**63 - 4096)):
        if unlimited != "max" or "/" not in limit:
            (tmp_path / limit).write_text(f"{unlimited}\n")
            assert host_memory(tmp_path).total_bytes == psutil.virtual_memory().total
