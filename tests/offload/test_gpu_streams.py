"""On CUDA: every attention kernel, memory that comes back, streams of the user's, and copies far slower or faster than compute."""

import copy
import gc
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlx.offload.storage.arena import host_arena

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

WIDTH = 512
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@pytest.fixture
def decoder(toys):
    """Six layers in half precision with attention on eight heads of 64, four of keys and values."""
    model = toys.stack(lambda: toys.attend(WIDTH, 8, 4, dropout=0.1), blocks=6, width=WIDTH)
    return model.to("cuda", torch.bfloat16)


def tokens(length=1024, seed=1, width=WIDTH):
    x = torch.randn(4, length, width, generator=torch.Generator().manual_seed(seed))
    return x.to("cuda", torch.bfloat16)


def read(model):
    return model(tokens())


def assert_repeats(toys, model, step):
    """Plain autograd itself gives the same bits twice, without which nothing can be compared."""
    try:
        first, second = (toys.grade(copy.deepcopy(model), step) for _ in range(2))
    except RuntimeError as error:
        pytest.skip(f"this machine lacks the kernel: {error}")
    if not all(torch.equal(grad, second.grads[name]) for name, grad in first.grads.items()):
        pytest.skip("plain gradients differ from run to run with this kernel")


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("where", ["forward", "both"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_attention_kernel(compare, toys, every_saving, kernel, where, dropout):
    if kernel == "cudnn" and dropout:
        pytest.skip("cuDNN's attention takes no dropout in training on every release")
    if kernel == "cudnn":
        torch.use_deterministic_algorithms(False)  # of cuDNN's kernels none counts as deterministic
    model = toys.stack(lambda: toys.attend(WIDTH, 8, 8, 0.1, dropout), blocks=3, width=WIDTH).to("cuda", torch.bfloat16)

    def step(model):
        with sdpa_kernel(KERNELS[kernel]):
            loss = read(model)
            if where == "both":
                loss.backward()
        if where == "forward":
            loss.backward()
        return loss.detach()

    assert_repeats(toys, model, step)
    stats = compare(model, step, **every_saving)
    hidden = 4 * 1024 * WIDTH * 2
    if every_saving["save"] == "boundary":
        assert stats.offloaded_bytes == 3 * hidden
    elif kernel != "math":
        assert stats.offloaded_bytes >= 3 * 6 * hidden  # input, q, k, v, attention, o


def test_lengths_that_kernels_pad(compare, toys, every_saving, decoder):
    """Log-sum-exp and outputs have padded shapes at odd lengths and head sizes."""

    def step(model):
        for length in (1, 7, 33, 127, 1000):
            model(tokens(length, seed=length)).backward()
        return model(tokens(129))

    compare(decoder, step, **every_saving)
    narrow = toys.stack(lambda: toys.attend(80, 4, 2), blocks=3, width=80).to("cuda", torch.bfloat16)
    compare(narrow, lambda m: m(tokens(77, width=80)), **every_saving)


def assert_memory_returns_to(allocated):
    """At once, but for what a thread still reads from disk for a graph that is gone."""
    torch.cuda.synchronize()
    deadline = time.monotonic() + 10
    while torch.cuda.memory_allocated() != allocated and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == allocated


def test_memory_is_back_at_its_start_after_each_step(enable, decoder, every_mode):
    enable(decoder, **every_mode)
    decoder.zero_grad(set_to_none=False)
    for p in decoder.parameters():
        p.grad = torch.zeros_like(p)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for number in range(4):
        loss = read(decoder)
        if number % 2:
            torch.autograd.grad(loss, decoder.layers[3].v.weight)
        else:
            loss.backward()
        del loss
        assert_memory_returns_to(before)


def test_a_steady_step_allocates_no_host_memory(enable, decoder, every_saving):
    enable(decoder, **every_saving)
    for length in (1024, 300, 1024):
        decoder(tokens(length)).backward()
    torch.cuda.synchronize()
    allocations, reserved = host_arena(True).allocations, host_arena(True).reserved_bytes
    for length in (1, 700, 1024, 31, 1023, 512):
        decoder(tokens(length)).backward()
    assert host_arena(True).allocations == allocations
    assert host_arena(True).reserved_bytes == reserved


def test_two_graphs_on_two_streams(compare, decoder, every_saving):
    """Each graph runs backward on the stream of its own forward, in the other order."""

    def step(model):
        main, losses = torch.cuda.current_stream(), []
        streams = [torch.cuda.Stream() for _ in range(2)]
        for number, stream in enumerate(streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                losses.append(model(tokens(700 + number, seed=number)))
            main.wait_stream(stream)  # random numbers and weights in one order
        for loss in reversed(losses):
            loss.backward()
        return losses[0].detach().clone()

    compare(decoder, step, **every_saving)


def test_backward_under_another_stream_than_forward(compare, decoder, every_saving):
    def step(model):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        loss = read(model)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss.backward()
        main.wait_stream(side)
        return loss.detach()

    compare(decoder, step, **every_saving)


class Beside(nn.Module):
    """Half of the layer runs on a side stream, behind work that keeps it busy, and is waited for behind the last saved tensor."""

    def __init__(self, far):
        super().__init__()
        self.q, self.up, self.far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), far

    def forward(self, x):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(8):
                BUSY @ BUSY
            a = torch.tanh(self.q(x))
            a = a if self.far else a.exp()
        b = torch.sigmoid(self.up(x))
        main.wait_stream(side)
        x.record_stream(side)
        a.record_stream(main)
        return a + b if self.far else a + b.clone()


class Behind(nn.Module):
    """What backward comes to first runs on a side stream that is busy, always the same one; the rest on the main one."""

    def __init__(self):
        super().__init__()
        self.q, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        main = torch.cuda.current_stream()
        with torch.cuda.stream(SIDE):
            for _ in range(8):
                BUSY @ BUSY
        b = torch.sigmoid(self.up(x))
        SIDE.wait_stream(main)
        with torch.cuda.stream(SIDE):
            a = torch.tanh(self.q(x))
        main.wait_stream(SIDE)
        x.record_stream(SIDE)
        a.record_stream(main)
        return a + b


BUSY = SIDE = None


@pytest.mark.parametrize("far", [True, False])
def test_layers_half_on_another_stream(compare, toys, every_saving, far, monkeypatch):
    monkeypatch.setitem(globals(), "BUSY", torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16))
    model = toys.stack(lambda: Beside(far), blocks=4, width=WIDTH).to("cuda", torch.bfloat16)
    compare(model, lambda model: read(model) + read(model), **every_saving)  # streams are looked for in one of the two


def test_layers_that_backward_enters_on_another_stream(compare, toys, every_saving, monkeypatch):
    monkeypatch.setitem(globals(), "BUSY", torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16))
    monkeypatch.setitem(globals(), "SIDE", torch.cuda.Stream())
    compare(toys.stack(Behind, blocks=4, width=WIDTH).to("cuda", torch.bfloat16), read, **every_saving)


class Thin(nn.Module):
    """Next to no compute on much memory, so that compute always waits for copies."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(64, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        y = x * self.scale
        return y + torch.tanh(y[:, :8] @ self.q.weight).mean() * torch.sigmoid(x)


class Thick(nn.Module):
    """Much compute on little memory, so that the host is many steps ahead of the device."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4096, 4096, bias=False)

    def forward(self, x):
        for _ in range(4):
            x = F.normalize(self.q(x), dim=-1)
        a = x.unflatten(-1, (32, 128)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(a, a, a, is_causal=True).transpose(1, 2).flatten(2)


SCHEDULES = [{}, {"prefetch_layers": 0}, {"prefetch_layers": 4}, {"max_inflight_bytes": 0}, {"use_streams": False}]


def stress(enable, toys, model, step, saving, options):
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable(model, **saving, **options)
    results = []
    for number in range(6):
        results.append(toys.grade(model, step))
        if number % 2:
            step(model)  # a graph that is dropped while its bytes fly
        # What the allocator hands out next must not lie where a copy still reads or writes.
        for seed in range(4):
            torch.full((1 << 22,), float(seed), device="cuda").add_(1)
    for result in results:
        expected.assert_equal(result)
    torch.cuda.synchronize()
    gc.collect()
    assert handle.stats().held_bytes == 0


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_copies_slower_than_compute(enable, toys, every_saving, options):
    model = toys.stack(Thin, blocks=6, width=64).cuda()
    x = torch.randn(4, 1 << 16, 64, generator=torch.Generator().manual_seed(1)).cuda()  # 64 MiB a layer
    stress(enable, toys, model, lambda m: m(x), every_saving, options)


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_compute_slower_than_copies(enable, toys, every_saving, options):
    model = toys.stack(Thick, blocks=4, width=4096).to("cuda", torch.bfloat16)
    x = tokens(1024, width=4096)
    stress(enable, toys, model, lambda m: m(x), every_saving, options)


def test_disk_under_load(enable, toys, every_mode, decoder):
    """Copies, files and compute at once, with graphs dropped among them."""
    stress(enable, toys, decoder, read, every_mode, {})
