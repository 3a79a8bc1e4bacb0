"""Bytes that wait on disk. Faults are real ones: a limit on file size, descriptors that refuse, a killed process."""

import copy
import errno
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.offload import DiskError, OffloadOptions, enable_activation_offloading, host_arena, offload_activations, trim
from rlx.offload.copies import Arrival, Copier
from rlx.offload.disk import ExtentFile, extent_file
from rlx.offload.places import MIN_STAGING_BYTES, DiskStore, Staging
from rlx.offload.ranges import ALIGN_BYTES, aligned
from rlx.offload.stats import Counters, Timeline

MODES = pytest.mark.parametrize("enable_ckpt", [True, False], ids=["boundary", "all"])
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_on_disk(tmp_path):
    """After each test the folder is empty."""
    yield
    assert list(tmp_path.iterdir()) == []


def on_disk(path, **options):
    return {"tier": "disk", "directory": str(path), **options}


def wide(toys, blocks=5):
    """Blocks whose saved tensors take several chunks and end in the middle of a page."""
    return toys.stack(lambda: toys.block(72, dropout=0.1), blocks, 72)


def step(model):
    return model(torch.randn(1500, 72, generator=torch.Generator().manual_seed(1)))


@MODES
@pytest.mark.parametrize(
    ("prefetch_layers", "max_host_bytes"),
    [(None, None), (None, MIN_STAGING_BYTES), (0, 8 * MIB), (1, 8 * MIB), (100, MIN_STAGING_BYTES)],
)
def test_gradients_are_equal(compare, toys, tmp_path, enable_ckpt, prefetch_layers, max_host_bytes):
    options = on_disk(tmp_path, prefetch_layers=prefetch_layers, max_host_bytes=max_host_bytes)
    stats = compare(wide(toys), step, enable_ckpt, **options)
    assert stats.disk_bytes >= 2 * stats.offloaded_bytes > 0
    assert stats.copied_bytes == 2 * stats.offloaded_bytes
    assert stats.disk_reserved_bytes >= stats.offloaded_bytes or enable_ckpt
    assert stats.kept_bytes == 0
    assert stats.disk_gb_per_s > 0
    assert 0 <= stats.overlap <= 1


@MODES
def test_gradients_of_a_transformer_are_equal(compare, tmp_path, enable_ckpt):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 64, (2, 48))
    for save in ("boundary", "attention") if enable_ckpt else ("all",):
        compare(model, lambda m: m(input_ids=ids, labels=ids).loss, enable_ckpt, **on_disk(tmp_path, save=save))


def test_a_region_goes_to_disk(toys, tmp_path):
    model = wide(toys)
    expected = toys.grade(copy.deepcopy(model), step)
    with offload_activations(OffloadOptions(**on_disk(tmp_path, min_bytes=0))) as handle:
        got = toys.grade(model, step)
    expected.assert_equal(got)
    assert handle.stats().disk_bytes > 0


@MODES
def test_a_retained_graph_is_read_again(compare, toys, tmp_path, enable_ckpt):
    def twice(model):
        loss = step(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    compare(wide(toys), twice, enable_ckpt, **on_disk(tmp_path))


@MODES
def test_two_graphs_alive_backward_in_either_order(compare, toys, tmp_path, enable_ckpt):
    def both(model):
        first, second = step(model), model(torch.ones(700, 72))
        first.backward()
        second.backward()
        return first.detach()

    compare(wide(toys), both, enable_ckpt, **on_disk(tmp_path))


@MODES
def test_a_graph_dropped_while_its_bytes_are_written_or_read(enable, toys, tmp_path, enable_ckpt):
    model = wide(toys)
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable(model, enable_ckpt, **on_disk(tmp_path, prefetch_layers=3, max_host_bytes=8 * MIN_STAGING_BYTES))
    for number in range(6):
        torch.manual_seed(7)
        loss = step(model)
        if number % 2:  # only the last layers run backward: what was fetched ahead for the others is never used
            torch.autograd.grad(loss, model.layers[3].up.weight)
        del loss
        assert handle.stats().held_bytes == 0
        expected.assert_equal(toys.grade(model, step))
    assert handle.stats().held_bytes == 0


@MODES
def test_an_exception_in_a_layer_leaves_nothing(enable, toys, tmp_path, enable_ckpt):
    model = wide(toys)
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable(model, enable_ckpt, **on_disk(tmp_path))
    hook = model.layers[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    hook.remove()
    gc.collect()
    assert handle.stats().held_bytes == 0
    hook = model.layers[2].register_forward_hook(lambda _, __, y: y.register_hook(lambda grad: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        step(model).backward()
    hook.remove()
    gc.collect()
    assert handle.stats().held_bytes == 0
    expected.assert_equal(toys.grade(model, step))


def test_what_host_memory_has_no_room_for_goes_to_disk(compare, toys, tmp_path, caplog):
    cap = 2 * MIB
    host_arena(False).trim()
    stats = compare(wide(toys), step, False, directory=str(tmp_path), max_host_bytes=cap)
    assert 0 < stats.disk_bytes < 2 * stats.offloaded_bytes + 100 * ALIGN_BYTES
    assert stats.kept_bytes == 0
    assert stats.reserved_bytes <= cap
    warnings = [record.getMessage() for record in caplog.records if "host memory is full" in record.getMessage()]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]


def test_buffers_for_the_disk_stay_below_the_cap(compare, toys, tmp_path):
    host_arena(False).trim()
    stats = compare(wide(toys), step, False, **on_disk(tmp_path, max_host_bytes=3 * MIN_STAGING_BYTES + 5))
    assert 0 < stats.reserved_bytes <= max(3 * MIN_STAGING_BYTES, 2 * MIB)  # whole pages


def test_an_arena_that_others_fill_makes_room_beside_it_with_one_warning(compare, toys, tmp_path, caplog):
    arena = host_arena(False)
    arena.trim()
    arena.limit(MIB)
    account = arena.account()
    block = account.take(MIB)
    try:
        stats = compare(wide(toys), step, True, **on_disk(tmp_path))
    finally:
        arena.limit(None)
        account.give(block)
    assert stats.reserved_bytes == MIB
    assert caplog.text.count("host arena is full") == 1


def test_two_models_share_a_file(enable, toys, tmp_path):
    models = [wide(toys), wide(toys, blocks=3)]
    expected = [toys.grade(copy.deepcopy(model), step) for model in models]
    handles = [enable(model, bool(index), **on_disk(tmp_path)) for index, model in enumerate(models)]
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert extent_file(str(tmp_path)) is extent_file(str(link))
    link.unlink()
    # Interleaved, so that extents of one lie between those of the other.
    torch.manual_seed(7)
    first = step(models[0])
    assert handles[1].stats().held_bytes == 0 < handles[0].stats().held_bytes
    expected[1].assert_equal(toys.grade(models[1], step))
    first.backward()
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter.grad, expected[0].grads[name])
    assert handles[0].stats().disk_reserved_bytes == handles[1].stats().disk_reserved_bytes


def test_two_models_in_two_threads(enable, toys, tmp_path):
    model = toys.stack(lambda: toys.block(72), 4, 72)
    results, errors = {}, []

    def train(number):
        try:
            mine = copy.deepcopy(model)
            enable(mine, bool(number % 2), **on_disk(tmp_path, max_host_bytes=4 * MIN_STAGING_BYTES))
            for _ in range(3):
                mine.zero_grad()
                step(mine).backward()
            results[number] = [parameter.grad for parameter in mine.parameters()]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    step(model).backward()
    for grads in results.values():
        assert all(torch.equal(grad, p.grad) for grad, p in zip(grads, model.parameters(), strict=True))


CHILD = """
    import sys, torch
    from torch import nn
    from rlx.offload import OffloadOptions, enable_activation_offloading
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)])
    x = torch.randn(2000, 64)
    def run():
        y = x
        for layer in layers:
            y = layer(y)
        return y.square().sum()
    expected = torch.autograd.grad(run(), list(layers.parameters()))
    enable_activation_offloading(layers, False, OffloadOptions(tier="disk", directory=sys.argv[1], min_bytes=0), layers=list(layers))
    loss = run()
    print("forward", flush=True)
    sys.stdin.readline()
    grads = torch.autograd.grad(loss, list(layers.parameters()))
    print(all(map(torch.equal, grads, expected)), flush=True)
"""


@pytest.fixture
def child(tmp_path):
    """`child()`: a process that stands between forward and backward, with its activations in the folder."""
    started = []

    def start():
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)], **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_processes_that_share_a_folder_and_one_that_is_killed(child, tmp_path):
    killed, other = child(), child()
    assert (killed.stdout.readline(), other.stdout.readline()) == ("forward\n", "forward\n")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert list(tmp_path.iterdir()) == []
    out, _ = other.communicate("go on\n", timeout=60)
    assert (out, other.returncode) == ("True\n", 0)


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
    model = wide(toys)
    expected = toys.grade(copy.deepcopy(model), step)
    before = copy.deepcopy(model.state_dict())
    handle = enable(model, enable_ckpt, **on_disk(tmp_path))
    room(ALIGN_BYTES * 150)
    with pytest.raises(DiskError, match=r"needs \d+ more") as error:
        step(model)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path))
    assert pickle.loads(pickle.dumps(error.value)).args == error.value.args
    del error
    gc.collect()
    assert handle.stats().held_bytes == 0
    room()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected.assert_equal(toys.grade(model, step))


def test_less_than_a_growth_step_is_taken_where_no_more_is_left(tmp_path, room):
    file = ExtentFile(str(tmp_path))
    file.take(2 * MIB)
    room(2 * MIB + 5 * ALIGN_BYTES)
    file.take(5 * ALIGN_BYTES)
    with pytest.raises(DiskError):
        file.take(ALIGN_BYTES)
    assert file.nbytes == 2 * MIB + 5 * ALIGN_BYTES


@pytest.fixture
def break_file():
    """`break_file(file, path, flags)`: the file's descriptor is another one from now on; none: as before."""
    saved = []

    def swap(file, path=None, flags=0):
        if path is None:
            os.dup2(saved.pop(), file._descriptor)
            return
        saved.append(os.dup(file._descriptor))
        broken = os.open(path, flags)
        os.dup2(broken, file._descriptor)
        os.close(broken)

    yield swap
    assert not saved


@MODES
@pytest.mark.parametrize("what", ["write", "read"])
def test_a_failing_disk_is_an_error_in_backward_and_the_next_step_is_clean(
    enable, toys, tmp_path, break_file, enable_ckpt, what
):
    model = wide(toys)
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable(model, enable_ckpt, **on_disk(tmp_path))
    expected.assert_equal(toys.grade(model, step))
    file = extent_file(str(tmp_path))
    moved = handle.stats().disk_bytes
    if what == "write":
        break_file(file, "/dev/full", os.O_RDWR)  # each write: no space left on device
        loss = step(model)
        file.drain()
        assert handle.stats().disk_bytes == moved
    else:
        loss = step(model)
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
        expected.assert_equal(toys.grade(model, step))
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


def test_an_unused_file_is_closed(toys, tmp_path):
    def open_files():
        return sorted(os.listdir("/proc/self/fd"))

    gc.collect()
    before = open_files()
    model = wide(toys)
    handle = enable_activation_offloading(model, True, OffloadOptions(**on_disk(tmp_path, min_bytes=0)))
    step(model).backward()
    assert open_files() != before
    handle.disable()
    del handle, model
    gc.collect()
    for _ in range(100):  # an idle thread lets go of the last task's results when it sees that it is done
        if open_files() == before:
            break
        threading.Event().wait(0.01)
    assert open_files() == before


def test_a_forked_child_is_refused(enable, toys, tmp_path):
    """Also where the parent ran forward: the threads that would read are not in the child."""
    model = toys.stack()
    enable(model, False, **on_disk(tmp_path))
    loss = model(torch.randn(4, 8)).sum()
    file = extent_file(str(tmp_path))
    for run in (loss.backward, lambda: file.take(1)):
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


def test_trim_in_a_forked_child_leaves_the_file_alone(tmp_path):
    file = extent_file(str(tmp_path))
    file.returned.append(file.take(MIB))
    size = file.nbytes
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        trim()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.fstat(file._descriptor).st_size == size


def test_a_thread_that_cannot_be_started_is_an_error_after_which_nothing_hangs(tmp_path, monkeypatch):
    file = ExtentFile(str(tmp_path))
    store = DiskStore(file, Staging(host_arena(False), ALIGN_BYTES), warning=None)
    copier = Copier(torch.device("cpu"), True, Counters(), Timeline())
    source = torch.zeros(40 * ALIGN_BYTES, dtype=torch.uint8)
    go_on = threading.Event()
    file.submit_write(go_on.wait)  # the one thread there is has something to do

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            store.take(source.numel()).write(copier, source)
    go_on.set()
    gc.collect()
    place = store.take(source.numel())
    place.write(copier, source)
    file.drain()
    place.written.wait()
    del place
    assert host_arena(False).held_bytes == 0
    file.trim()
    assert file.nbytes == 0


def test_trim_empties_the_file_once_nothing_is_in_use(tmp_path):
    file = extent_file(str(tmp_path))
    kept, given = file.take(5 * MIB), file.take(MIB)
    file.returned.append(given)
    trim()
    assert file.nbytes >= 6 * MIB
    assert os.fstat(file._descriptor).st_blocks * 512 >= 6 * MIB  # the room is taken, not only promised
    file.returned.append(kept)
    trim()
    assert file.nbytes == 0
    assert os.fstat(file._descriptor).st_size == 0
    assert file.take(MIB)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    chunk_pages=st.integers(1, 40),
)
def test_what_comes_back_is_what_left(tmp_path_factory, sizes, order, chunk_pages):
    """Tensors of any length through chunks of any size; some are dropped on the way, others take their extents."""
    file = extent_file(str(tmp_path_factory.getbasetemp()))
    store = DiskStore(file, Staging(host_arena(False), chunk_pages * ALIGN_BYTES), warning=None)
    copier = Copier(torch.device("cpu"), True, Counters(), Timeline())
    held = []
    for number, size in enumerate(sizes):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        place = store.take(size)
        place.write(copier, source)
        held.append((place, source))
        del place
        if number % 3 == 2:
            held.pop(order.randrange(len(held)))[0].give()
    order.shuffle(held)
    arrivals = []
    for place, source in held:
        arrival = Arrival(source.numel(), source.device, None)
        place.read(copier, arrival)
        arrivals.append((arrival, source))
    for arrival, source in arrivals:
        copier.wait_for(arrival)
        assert torch.equal(arrival.buffer, source)
    assert store.held_bytes == sum(source.numel() for _, source in held)
    for place, _ in held:
        place.give()
    assert store.held_bytes == 0
    assert aligned(sum(sizes)) <= file.nbytes
    del place
    held.clear()
    file.trim()
    assert file.nbytes == 0
