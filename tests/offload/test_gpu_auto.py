"""`save="auto"` on CUDA: the same bits, room that is found and kept to, nothing that waits for the device."""

import copy
import gc

import pytest
import torch

from rlx.offload.autotune.decide import LAYER_STRIDE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

WIDTH, LAYERS, MIB = 1024, 10, 1 << 20
# One warms up, one is measured, some more where the device waited for the host; the last follows a plan.
PASSES = LAYER_STRIDE + 4


@pytest.fixture(autouse=True)
def clean_device():
    """Free what cycles of earlier tests hold: if they were collected during a test, it would find more room from then on."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def decoder(toys):
    """Ten layers with attention on sixteen heads of 64."""
    return toys.stack(lambda: toys.attend(WIDTH, 16, 16, dropout=0.1), blocks=LAYERS, width=WIDTH).cuda()


def read(model, rows=8192, seed=1):
    """A step on four sequences."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()
    return model(x.unflatten(0, (4, -1)))


def peak_bytes(model):
    """Peak of device memory over a step, above what was there before."""
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    read(model).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def planned(model, handle, before=lambda: None, after=lambda: None):
    """Steps until one has followed a plan."""
    for _ in range(PASSES):
        before()
        read(model).backward()
        after()
        torch.cuda.synchronize()
        if handle.plan() is not None:
            break
    assert handle.plan() is not None
    return handle.plan()


@pytest.mark.parametrize("budget", [0, 700 * MIB, 1500 * MIB, "auto"])
def test_gradients_are_those_of_plain_autograd_before_and_after_the_plan(toys, enable, decoder, budget):
    expected = toys.grade(copy.deepcopy(decoder), read)
    handle = enable(decoder, True, save="auto", max_device_bytes=budget)
    for _ in range(PASSES + 1):
        expected.assert_equal(toys.grade(decoder, read))
        torch.cuda.synchronize()
        assert handle.stats().held_bytes == 0
    assert handle.plan() is not None


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_a_step_needs_about_as_much_as_its_plan_says_and_no_more_than_it_may(enable, decoder, share):
    plain = peak_bytes(decoder)
    lean = enable(decoder, True)
    least = peak_bytes(decoder)
    lean.disable()
    budget = int(least + share * (plain - least))
    handle = enable(decoder, True, save="auto", max_device_bytes=budget)
    plan = planned(decoder, handle)
    found = peak_bytes(decoder)
    assert found <= 1.05 * max(budget, least) + 16 * MIB
    assert found == pytest.approx(plan.prediction.peak_bytes, rel=0.15, abs=32 * MIB)


def test_where_everything_fits_nothing_leaves_and_the_peak_is_that_of_plain(enable, decoder):
    plain = peak_bytes(decoder)
    handle = enable(decoder, True, save="auto")
    assert all(layer.keep for layer in planned(decoder, handle).layers)
    before = handle.stats()
    assert peak_bytes(decoder) <= 1.01 * plain + 16 * MIB
    step = handle.stats().since(before)
    assert (step.offloaded_bytes, step.recomputed_ms) == (0, 0)


def test_nothing_waits_for_the_device(enable, decoder):
    x = torch.randn(4, 2048, WIDTH, device="cuda")
    handle = enable(decoder, True, save="auto", max_device_bytes=700 * MIB)
    decoder(x).backward()  # the arena grows, kernels are loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * PASSES):
            decoder(x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(PASSES):
        torch.cuda.synchronize()
        decoder(x).backward()
    assert handle.plan() is not None
