"""On CUDA: host memory registered with the driver, and the disk tier with its threads and streams."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from rlx.offload import HostArena
from rlx.offload.storage.arena import Pages
from rlx.offload.storage.ranges import MIN_STAGING_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MODES = pytest.mark.parametrize("enable_ckpt", [True, False], ids=["boundary", "all"])
WIDTH = 512
MIB = 1 << 20


@pytest.fixture
def model(toys):
    return toys.stack(lambda: toys.block(WIDTH, dropout=0.1), blocks=6, width=WIDTH).cuda()


def step(model, rows=4096):
    return model(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).cuda())


def resident_bytes():
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def test_registered_memory_has_any_size_and_is_page_locked():
    arena = HostArena(pinned=True)
    account = arena.account()
    block = account.allocate(35 * MIB)
    assert arena.reserved_bytes == 36 * MIB
    assert arena.pinned
    assert all(view.is_pinned() for view in block.views)
    account.free(block)


def test_trim_gives_registered_memory_back_to_the_system():
    arena = HostArena(pinned=True)
    account = arena.account()
    for _ in range(5):
        block = account.allocate(256 * MIB)
        block.views[0].copy_(torch.zeros(block.views[0].numel(), dtype=torch.uint8, device="cuda"))
        held = resident_bytes()
        account.free(block)
        del block
        assert arena.trim() == 256 * MIB
        assert resident_bytes() <= held - 250 * MIB
    assert arena.pinned


def test_an_arena_that_is_dropped_unlocks_its_memory():
    for _ in range(5):
        arena = HostArena(pinned=True)
        assert arena.account().allocate(64 * MIB).views[0].is_pinned()
        assert arena.pinned
        del arena
        gc.collect()


def test_a_refused_registration_is_an_error_of_its_own_and_not_of_the_next_kernel():
    pages = Pages(4 * MIB, is_locked=True)
    from rlx.offload.storage import arena as module

    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        module._register(pages.bytes)
    assert torch.ones(4, device="cuda").add(1).sum().item() == 8
    pages.close()
    assert not pages.bytes.is_pinned()


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the advice is Linux's")
def test_a_forked_child_does_not_copy_page_locked_memory():
    pages = Pages(8 * MIB, is_locked=True)
    address = pages.bytes.data_ptr()
    flags = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif line.startswith("VmFlags:") and is_here:
            flags = line.split()[1:]
    assert "dc" in flags
    pages.close()


def test_copies_to_registered_memory_do_not_wait():
    account = HostArena(pinned=True).account()
    block = account.allocate(64 * MIB)
    source = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy
    block.views[0].copy_(source, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert not event.query()
    event.synchronize()
    assert bool((block.views[0] == 1).all())
    account.free(block)


@MODES
@pytest.mark.parametrize(
    "options",
    [{"prefetch_layers": n} for n in (0, 1, 3, 100)]
    + [
        {"pin_memory": False},
        {"use_streams": False},
        {"max_inflight_bytes": 0},
        {"max_host_bytes": MIN_STAGING_BYTES},
        {"max_host_bytes": 64 * MIB},
    ],
    ids=str,
)
def test_gradients_are_equal_on_any_schedule(compare, model, tmp_path, enable_ckpt, options):
    stats = compare(model, step, enable_ckpt, tier="disk", directory=str(tmp_path), **options)
    # In each of two steps the last layer may find its input still here.
    assert stats.disk_bytes >= 2 * (6 - 1) * 4096 * WIDTH * 4
