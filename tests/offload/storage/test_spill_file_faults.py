"""The disk tier when something fails. Faults are real ones: a limit on file size, descriptors that refuse, a killed process."""

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

from rlx.offload import DiskError, OffloadOptions, enable_activation_offloading, host_arena, trim
from rlx.offload.storage.disk import extent_file
from rlx.offload.storage.ranges import PAGE_ALIGN_BYTES

MODES = pytest.mark.parametrize("enable_ckpt", [True, False], ids=["boundary", "all"])
pytestmark = pytest.mark.usefixtures("emptied_folder")


def on_disk(path, **options):
    return {"tier": "disk", "directory": str(path), **options}


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
