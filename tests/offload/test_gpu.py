"""On CUDA: streams, overlap, memory, and gradients bit for bit under deterministic kernels."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

WIDTH = 512


@pytest.fixture
def model(toys):
    return toys.stack(lambda: toys.block(WIDTH, dropout=0.1), blocks=6, width=WIDTH).cuda()


@pytest.fixture
def decoder(toys):
    """Six layers with attention on eight heads of 64."""
    return toys.stack(lambda: toys.attend(WIDTH, 8, 8, dropout=0.1), blocks=6, width=WIDTH).cuda()


def batch(rows=4096, seed=1):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def step(model):
    return model(batch())


def read(model, rows=4096):
    """A step on four sequences."""
    return model(batch(rows).unflatten(0, (4, -1)))


def peak_bytes(model, run):
    """Peak of device memory over a step, above what was there before."""
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(model).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("use_streams", [True, False])
def test_gradients_are_equal(compare, decoder, every_saving, pin_memory, use_streams):
    stats = compare(decoder, read, **every_saving, pin_memory=pin_memory, use_streams=use_streams)
    assert stats.offloaded_bytes >= 6 * 4096 * WIDTH * 4


@pytest.mark.parametrize(
    "options",
    [{"prefetch_layers": n} for n in (0, 1, 3, 100)] + [{"max_inflight_bytes": n} for n in (0, 1 << 24)],
    ids=str,
)
def test_gradients_are_equal_on_any_schedule(compare, decoder, every_saving, options):
    compare(decoder, read, **every_saving, **options)


def test_a_write_to_an_input_that_is_leaving_is_refused(enable, toys):
    """Plain autograd allows it, for nothing saved the input; the copy may be torn, so backward must not use it."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(WIDTH))
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.lin(torch.tanh(x + self.bias))

    model = toys.stack(Shift, width=WIDTH).cuda()
    enable(model, True)
    x = model.embed(batch())
    y = model.layers[0](x)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified in place while it was copied"):
        y.sum().backward()


def test_host_tensors_stay(enable, toys, every_saving):
    def forward(block, x):
        y = block.lin(x)
        return y + torch.tanh(y.cpu()).exp().cuda()

    model = toys.of(forward, width=WIDTH).cuda()
    handle = enable(model, **every_saving)
    step(model).backward()
    offloaded = handle.stats().offloaded_bytes
    assert offloaded == 3 * 4096 * WIDTH * 4  # each layer's input, which its linear saves; tanh and exp are on the host
    assert (handle.stats().kept_bytes > 0) == (every_saving["save"] == "all")


def test_boundary_takes_the_layers_inputs_off_the_device(enable, toys, model):
    layers, hidden = 6, 4096 * WIDTH * 4
    from torch.utils.checkpoint import checkpoint

    def checkpointed(m):
        x = m.embed(batch())
        for layer in m.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return m.head(x).sum()

    peak_bytes(model, step)
    with_checkpoint = peak_bytes(model, checkpointed)
    handle = enable(model, True)
    peak_bytes(model, step)
    with_offload = peak_bytes(model, step)
    # At most three inputs are on the device at once: the current layer's, the one before, and one on its way.
    assert with_offload <= with_checkpoint - (layers - 3) * hidden
    assert handle.stats().held_bytes == 0


def test_all_takes_saved_tensors_off_the_device(enable, model):
    plain = [peak_bytes(model, step) for _ in range(2)][1]
    enable(model, False)
    offloaded = [peak_bytes(model, step) for _ in range(2)][1]
    assert offloaded <= 0.75 * plain  # three of six layers, and what moves between them


def test_copies_overlap_compute(enable, toys):
    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2048, 2048, bias=False)

        def forward(self, x):
            for _ in range(20):
                x = torch.tanh(self.lin(x))
            return x

    torch.use_deterministic_algorithms(False)
    model = toys.stack(Busy, blocks=6, width=2048).cuda()
    x = torch.randn(8192, 2048, device="cuda")
    handle = enable(model, True)
    for _ in range(2):
        model(x).backward()
    torch.cuda.synchronize()
    warm = handle.stats()
    for _ in range(3):
        model(x).backward()
    torch.cuda.synchronize()
    stats = handle.stats().since(warm)
    assert stats.copied_bytes > 0
    assert stats.copy_ms > 0
    assert stats.overlap > 0.5
    assert stats.recomputed_ms > 0


def test_fsdp2_over_nccl(enable, toys, every_saving):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:

        def build(policy):
            model = toys.stack(lambda: toys.attend(WIDTH, 8, 8, dropout=0.1), blocks=4, width=WIDTH).cuda()
            for layer in model.layers:
                fully_shard(layer, mp_policy=policy)
            return fully_shard(model, mp_policy=policy)

        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
            plain, model = build(policy), build(policy)
            expected = toys.grade(plain, read)
            handle = enable(model, **every_saving)
            got = toys.grade(model, read)
            for name, grad in expected.grads.items():
                assert torch.equal(grad.to_local(), got.grads[name].to_local()), name
            assert handle.stats().offloaded_bytes > 0
            assert handle.stats().held_bytes == 0
    finally:
        dist.destroy_process_group()
