"""When the engine's host memory is given back: only if it is short, of the machine or of the container."""

import logging

import psutil
import pytest

from rlx.config.host_memory import HostMemory, all_host_bytes, host_memory
from rlx.engine.host_offload import HostRelief, host_use
from rlx.offload import host_arena

SHORT, PLENTY = HostMemory(19, 100), HostMemory(20, 100)
MIB = 1 << 20


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


def test_nothing_is_said_when_there_is_nothing_to_give(caplog):
    caplog.set_level(logging.INFO, "rlx")
    host_arena(False).trim()
    assert HostRelief().relieve(SHORT) == 0
    assert not caplog.records


def test_what_is_in_use_stays(reserved):
    account = reserved.account()
    block = account.allocate(MIB)
    HostRelief().relieve(SHORT)
    assert reserved.reserved_bytes >= MIB
    block.views[0].fill_(1)
    assert int(block.views[0].sum()) == block.views[0].numel()
    account.free(block)


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
