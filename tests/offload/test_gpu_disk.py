"""On CUDA: host memory registered with the driver, and the disk tier with its threads and streams."""

import copy
import gc
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from rlx.offload import DiskError, HostArena, host_arena, trim
from rlx.offload.storage.arena import Pages
from rlx.offload.storage.disk import extent_file
from rlx.offload.storage.ranges import MIN_STAGING_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

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
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("use_streams", [True, False])
def test_gradients_are_equal(compare, model, tmp_path, enable_ckpt, pin_memory, use_streams):
    options = {"tier": "disk", "directory": str(tmp_path), "pin_memory": pin_memory, "use_streams": use_streams}
    stats = compare(model, step, enable_ckpt, **options)
    assert stats.disk_bytes >= (2 * 6 - 1) * 4096 * WIDTH * 4  # the last layer finds its input still here
    assert list(tmp_path.iterdir()) == []


@MODES
@pytest.mark.parametrize(
    "options",
    [{"prefetch_layers": n} for n in (0, 1, 3, 100)]
    + [{"max_inflight_bytes": 0}, {"max_host_bytes": MIN_STAGING_BYTES}, {"max_host_bytes": 64 * MIB}],
    ids=str,
)
def test_gradients_are_equal_on_any_schedule(compare, model, tmp_path, enable_ckpt, options):
    compare(model, step, enable_ckpt, tier="disk", directory=str(tmp_path), **options)


@MODES
def test_many_steps_and_dropped_graphs_with_one_file(enable, toys, model, tmp_path, enable_ckpt):
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable(model, enable_ckpt, tier="disk", directory=str(tmp_path), prefetch_layers=3)
    expected.assert_equal(toys.grade(model, step))
    size = handle.stats().disk_reserved_bytes
    for number in range(8):
        torch.manual_seed(7)
        loss = step(model)
        if number % 2:  # what was fetched ahead for the lower layers is never used
            torch.autograd.grad(loss, model.layers[4].up.weight)
        del loss
        assert handle.stats().held_bytes == 0
        scratch = [torch.full((4096, WIDTH), float(number), device="cuda") for _ in range(12)]
        expected.assert_equal(toys.grade(model, step))
        assert all(bool((tensor == number).all()) for tensor in scratch)
        step(model, rows=100 + 300 * number).backward()
    assert handle.stats().disk_reserved_bytes <= 2 * size + 64 * MIB  # a dropped graph's extents may still be in use
    assert handle.stats().held_bytes == 0


@MODES
@pytest.mark.parametrize("what", ["write", "read"])
def test_a_failing_disk_is_an_error_in_backward_and_the_next_step_is_clean(
    enable, toys, model, tmp_path, enable_ckpt, what
):
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable(model, enable_ckpt, tier="disk", directory=str(tmp_path))
    expected.assert_equal(toys.grade(model, step))
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    file = extent_file(str(tmp_path))
    good = os.dup(file.descriptor)

    def break_with(path):
        broken = os.open(path, os.O_RDWR)
        os.dup2(broken, file.descriptor)
        os.close(broken)

    if what == "write":
        break_with("/dev/full")
    loss = step(model)
    if what == "read":
        file.drain()
        break_with("/dev/null")
    with pytest.raises(DiskError, match=f"failed to {what}"):
        loss.backward()
    os.dup2(good, file.descriptor)
    os.close(good)
    del loss
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    gc.collect()
    assert handle.stats().held_bytes == 0
    assert torch.cuda.memory_allocated() == allocated
    expected.assert_equal(toys.grade(model, step))


def test_what_host_memory_has_no_room_for_goes_to_disk(compare, model, tmp_path, caplog):
    host_arena(True).trim()
    stats = compare(model, step, True, directory=str(tmp_path), max_host_bytes=32 * MIB)
    assert stats.kept_bytes == 0
    assert 0 < stats.disk_bytes < 2 * stats.offloaded_bytes
    assert host_arena(True).reserved_bytes <= 32 * MIB
    assert caplog.text.count("host memory is full") == 1


def test_reads_and_writes_overlap_compute(enable, toys, tmp_path):
    class Busy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(2048, 2048, bias=False)

        def forward(self, x):
            for _ in range(60):
                x = torch.tanh(self.lin(x))
            return x

    torch.use_deterministic_algorithms(False)
    model = toys.stack(Busy, blocks=8, width=2048).cuda()
    x = torch.randn(8192, 2048, device="cuda")
    handle = enable(model, True, tier="disk", directory=str(tmp_path), prefetch_layers=2)
    for _ in range(2):
        model(x).backward()
    torch.cuda.synchronize()
    warm = handle.stats()
    for _ in range(3):
        model(x).backward()
    torch.cuda.synchronize()
    stats = handle.stats().since(warm)
    print(stats, stats.disk_gb_per_s, stats.copy_gb_per_s, stats.overlap)
    assert 0 < stats.disk_bytes <= stats.copied_bytes  # what is used up before its turn comes is never written
    assert stats.overlap > 0.3


def test_trim_gives_everything_back(enable, model, tmp_path):
    handle = enable(model, True, tier="disk", directory=str(tmp_path))
    step(model).backward()
    torch.cuda.synchronize()
    gc.collect()
    assert handle.stats().reserved_bytes > 0
    assert trim() > 0
    assert (handle.stats().reserved_bytes, handle.stats().disk_reserved_bytes) == (0, 0)
    step(model).backward()
