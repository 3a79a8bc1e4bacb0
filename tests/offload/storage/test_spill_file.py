"""Bytes that wait on disk: gradients, sharing, what comes back, and what happens when something fails.

Faults are real ones: a limit on file size, descriptors that refuse, a killed process.
"""

import copy
import errno
import gc
import os
import pickle
import resource
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.offload import DiskError, OffloadOptions, enable_activation_offloading, host_arena, trim
from rlx.offload.storage.disk import DiskTier, StagingBuffers, extent_file
from rlx.offload.storage.offloader import CopyStreams, Counters, FetchBuffer, Timeline
from rlx.offload.storage.ranges import MIN_STAGING_BYTES, PAGE_ALIGN_BYTES, page_aligned

MODES = pytest.mark.parametrize("enable_ckpt", [True, False], ids=["boundary", "all"])
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("emptied_folder")


def on_disk(path, **options):
    return {"tier": "disk", "directory": str(path), **options}


@MODES
@pytest.mark.parametrize(("prefetch_layers", "max_host_bytes"), [(None, None), (0, 8 * MIB), (100, MIN_STAGING_BYTES)])
def test_gradients_are_equal(compare, toys, tmp_path, enable_ckpt, prefetch_layers, max_host_bytes):
    options = on_disk(tmp_path, prefetch_layers=prefetch_layers, max_host_bytes=max_host_bytes)
    stats = compare(toys.wide(), toys.read_wide, enable_ckpt, **options)
    assert stats.disk_bytes >= 2 * stats.offloaded_bytes > 0
    assert stats.copied_bytes == 2 * stats.offloaded_bytes
    assert stats.disk_reserved_bytes >= stats.offloaded_bytes or enable_ckpt
    assert stats.kept_bytes == 0
    assert stats.disk_gb_per_s > 0
    assert 0 <= stats.overlap <= 1


@MODES
def test_a_graph_dropped_while_its_bytes_are_written_or_read(enable, toys, tmp_path, enable_ckpt):
    model = toys.wide()
    expected = toys.grade(copy.deepcopy(model), toys.read_wide)
    handle = enable(model, enable_ckpt, **on_disk(tmp_path, prefetch_layers=3, max_host_bytes=8 * MIN_STAGING_BYTES))
    for number in range(4):
        torch.manual_seed(7)
        loss = toys.read_wide(model)
        if number % 2:  # only the last layers run backward: what was fetched ahead for the others is never used
            torch.autograd.grad(loss, model.layers[3].up.weight)
        del loss
        assert handle.stats().held_bytes == 0
        expected.assert_equal(toys.grade(model, toys.read_wide))
    assert handle.stats().held_bytes == 0


def test_what_host_memory_has_no_room_for_goes_to_disk(compare, toys, tmp_path, caplog):
    cap = 2 * MIB
    host_arena(False).trim()
    stats = compare(toys.wide(), toys.read_wide, False, directory=str(tmp_path), max_host_bytes=cap)
    assert 0 < stats.disk_bytes < 2 * stats.offloaded_bytes + 100 * PAGE_ALIGN_BYTES
    assert stats.kept_bytes == 0
    assert stats.reserved_bytes <= cap
    warnings = [record.getMessage() for record in caplog.records if "host memory is full" in record.getMessage()]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]


def test_an_arena_that_others_fill_makes_room_beside_it_with_one_warning(compare, toys, tmp_path, caplog):
    arena = host_arena(False)
    arena.trim()
    arena.limit(MIB)
    account = arena.account()
    block = account.allocate(MIB)
    try:
        stats = compare(toys.wide(), toys.read_wide, True, **on_disk(tmp_path))
    finally:
        arena.limit(None)
        account.free(block)
    assert stats.reserved_bytes == MIB
    assert caplog.text.count("host arena is full") == 1


def test_two_models_share_a_file(enable, toys, tmp_path):
    models = [toys.wide(), toys.wide(blocks=3)]
    expected = [toys.grade(copy.deepcopy(model), toys.read_wide) for model in models]
    handles = [enable(model, bool(index), **on_disk(tmp_path)) for index, model in enumerate(models)]
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert extent_file(str(tmp_path)) is extent_file(str(link))
    link.unlink()
    # Interleaved, so that extents of one lie between those of the other.
    torch.manual_seed(7)
    first = toys.read_wide(models[0])
    assert handles[1].stats().held_bytes == 0 < handles[0].stats().held_bytes
    expected[1].assert_equal(toys.grade(models[1], toys.read_wide))
    first.backward()
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter.grad, expected[0].grads[name])
    assert handles[0].stats().disk_reserved_bytes == handles[1].stats().disk_reserved_bytes


def test_trim_empties_the_file_once_nothing_is_in_use(tmp_path):
    file = extent_file(str(tmp_path))
    kept, given = file.allocate(5 * MIB), file.allocate(MIB)
    file.freed.append(given)
    trim()
    assert file.nbytes >= 6 * MIB
    assert os.fstat(file.descriptor).st_blocks * 512 >= 6 * MIB  # the room is taken, not only promised
    file.freed.append(kept)
    trim()
    assert file.nbytes == 0
    assert os.fstat(file.descriptor).st_size == 0
    assert file.allocate(MIB)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    chunk_pages=st.integers(1, 40),
)
def test_what_comes_back_is_what_left(tmp_path_factory, sizes, order, chunk_pages):
    """Tensors of any length through chunks of any size; some are dropped on the way, others take their extents."""
    file = extent_file(str(tmp_path_factory.getbasetemp()))
    tier = DiskTier(file, StagingBuffers(host_arena(False), chunk_pages * PAGE_ALIGN_BYTES), warning=None)
    copy_streams = CopyStreams(torch.device("cpu"), True, Counters(), Timeline())
    held = []
    for number, size in enumerate(sizes):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        allocation = tier.allocate(size)
        allocation.write(copy_streams, source)
        held.append((allocation, source))
        del allocation
        if number % 3 == 2:
            held.pop(order.randrange(len(held)))[0].free()
    order.shuffle(held)
    arrivals = []
    for allocation, source in held:
        fetch_buffer = FetchBuffer(source.shape, source.dtype, source.device, None)
        allocation.read(copy_streams, fetch_buffer)
        arrivals.append((fetch_buffer, source))
    for fetch_buffer, source in arrivals:
        copy_streams.wait_for(fetch_buffer)
        assert torch.equal(fetch_buffer.tensor, source)
    assert tier.held_bytes == sum(source.numel() for _, source in held)
    for allocation, _ in held:
        allocation.free()
    assert tier.held_bytes == 0
    assert page_aligned(sum(sizes)) <= file.nbytes
    del allocation
    held.clear()
    file.trim()
    assert file.nbytes == 0


# Faults


@pytest.fixture
def room():
    """`room(nbytes)`: no file may become longer, as on a disk that is full; none: as before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes=None):
        resource.setrlimit(resource.RLIMIT_FSIZE, before if nbytes is None else (nbytes, before[1]))

    yield limit
    limit()


@MODES
def test_a_full_disk_is_an_error_in_forward_and_the_next_step_is_clean(enable, toys, tmp_path, room, enable_ckpt):
    model = toys.wide()
    expected = toys.grade(copy.deepcopy(model), toys.read_wide)
    before = copy.deepcopy(model.state_dict())
    handle = enable(model, enable_ckpt, **on_disk(tmp_path))
    room(PAGE_ALIGN_BYTES * 150)
    with pytest.raises(DiskError, match=r"needs \d+ more") as error:
        toys.read_wide(model)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path))
    assert pickle.loads(pickle.dumps(error.value)).args == error.value.args
    del error
    gc.collect()
    assert handle.stats().held_bytes == 0
    room()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected.assert_equal(toys.grade(model, toys.read_wide))


@pytest.fixture
def break_file():
    """`break_file(file, path, flags)`: the file's descriptor is another one from now on; none: as before."""
    saved = []

    def swap(file, path=None, flags=0):
        if path is None:
            os.dup2(saved.pop(), file.descriptor)
            return
        saved.append(os.dup(file.descriptor))
        broken = os.open(path, flags)
        os.dup2(broken, file.descriptor)
        os.close(broken)

    yield swap
    assert not saved


@MODES
@pytest.mark.parametrize("what", ["write", "read"])
def test_a_failing_disk_is_an_error_in_backward_and_the_next_step_is_clean(
    enable, toys, tmp_path, break_file, enable_ckpt, what
):
    model = toys.wide()
    expected = toys.grade(copy.deepcopy(model), toys.read_wide)
    handle = enable(model, enable_ckpt, **on_disk(tmp_path))
    expected.assert_equal(toys.grade(model, toys.read_wide))
    file = extent_file(str(tmp_path))
    moved = handle.stats().disk_bytes
    if what == "write":
        break_file(file, "/dev/full", os.O_RDWR)  # each write: no space left on device
        loss = toys.read_wide(model)
        file.drain()
        assert handle.stats().disk_bytes == moved
    else:
        loss = toys.read_wide(model)
        file.drain()
        break_file(file, "/dev/null", os.O_RDWR)  # each read: end of file
    with pytest.raises(DiskError, match=f"failed to {what}"):
        loss.backward()
    break_file(file)
    del loss
    gc.collect()
    assert handle.stats().held_bytes == 0
    file.drain()
    assert host_arena(False).held_bytes == 0
    for _ in range(2):
        expected.assert_equal(toys.grade(model, toys.read_wide))
    trim()
    assert file.nbytes == 0  # no extent was lost


@pytest.mark.parametrize("where", ["missing", "file", "/proc"])
def test_a_directory_that_cannot_be_used_is_refused_when_switched_on(toys, tmp_path, where):
    path = tmp_path / where
    if where == "file":
        path.write_text("")
    options = OffloadOptions(**on_disk(path))  # a driver may lack the folder
    model = toys.stack()
    with pytest.raises(DiskError, match="exists, is writable and has room") as error:
        enable_activation_offloading(model, True, options)
    assert str(path) in str(error.value)
    assert "forward" not in vars(model.layers[0])
    assert not (tmp_path / "missing").exists()
    if where == "file":
        path.unlink()


def link_of(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


def test_an_unused_file_is_closed(toys, tmp_path):
    def open_files():
        """Those with a name, for other threads of this process open sockets and pipes when they like."""
        found = (link_of(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        return sorted(link for link in found if link.startswith("/"))

    gc.collect()
    before = open_files()
    model = toys.wide()
    handle = enable_activation_offloading(model, True, OffloadOptions(**on_disk(tmp_path, min_bytes=0)))
    toys.read_wide(model).backward()
    assert open_files() != before
    handle.disable()
    del handle, model
    gc.collect()
    until_s = time.monotonic() + 30
    while open_files() != before and time.monotonic() < until_s:
        time.sleep(0.01)  # an idle thread lets go of the last task's results when it sees that it is done
    assert open_files() == before


def test_a_forked_child_is_refused(enable, toys, tmp_path):
    """Also where the parent ran forward: the threads that would read are not in the child."""
    model = toys.stack()
    enable(model, False, **on_disk(tmp_path))
    loss = model(torch.randn(4, 8)).sum()
    file = extent_file(str(tmp_path))
    for run in (loss.backward, lambda: file.allocate(1)):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                run()
            except RuntimeError as error:
                os._exit(17 if "forked" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    loss.backward()
