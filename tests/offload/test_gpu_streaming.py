"""On CUDA: streamed weights give the same bits as resident ones, at every rate of copies, and leave the device."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from rlx.offload import OffloadOptions, enable_activation_offloading, enable_layer_offloading, enable_tiling
from rlx.offload.storage.offloader import CopyStreams
from rlx.offload.streaming.nf4 import NF4Linear, dequantized, quantize_layers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
WIDTH = 1024


@pytest.fixture
def decoder(toys):
    model = toys.adapt(toys.stack(lambda: toys.attend(WIDTH, 8, 4, dropout=0.1), blocks=8, width=WIDTH))
    return model.to("cuda", torch.bfloat16)


def read(model):
    x = torch.randn(2, 512, WIDTH, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    return model(x)


@pytest.mark.parametrize("slow", ["nothing", "copies", "compute"])
@pytest.mark.parametrize("save", [None, "boundary", "attention", "auto", "all"])
@pytest.mark.parametrize("is_on_disk", [False, True], ids=["host", "disk"])
def test_gradients_are_equal(decoder, toys, save, slow, is_on_disk, monkeypatch, tmp_path):
    plain = copy.deepcopy(decoder)
    if save == "attention":
        enable_tiling(decoder, 64)
        enable_tiling(plain, 64)
    handle = enable_layer_offloading(decoder, directory=tmp_path if is_on_disk else None)
    if save is not None:
        enable_activation_offloading(decoder, save != "all", OffloadOptions(save=save, min_bytes=0))
    if slow == "copies":
        copy_into = CopyStreams.copy_into

        def copy_late(self, target, block, fetch_buffer, after=None):
            with self._to_device:
                torch.cuda._sleep(5_000_000)
            return copy_into(self, target, block, fetch_buffer, after)

        monkeypatch.setattr(CopyStreams, "copy_into", copy_late)
    elif slow == "compute":
        for layer in decoder.layers:
            layer.mlp.register_forward_pre_hook(lambda module, args: torch.cuda._sleep(5_000_000))
    for _ in range(3):
        expected = toys.grade(plain, read)
        torch.cuda.synchronize()
        expected.assert_equal(toys.grade(decoder, read))
    assert handle.stats().copied_bytes > 0


def test_memory_of_the_device(decoder, toys):
    gc.collect()  # what other tests left
    plain_bytes = torch.cuda.memory_allocated()
    handle = enable_layer_offloading(decoder)
    enable_activation_offloading(decoder, True)
    assert plain_bytes - torch.cuda.memory_allocated() == pytest.approx(handle.streamed_bytes, rel=0.01)
    assert decoder.layers[0].q.base.weight.device.type == "cpu"
    assert decoder.layers[0].q.base.weight.is_pinned()
    read(decoder).backward()
    decoder.zero_grad()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated()
    handle.release()
    assert left - torch.cuda.memory_allocated() == pytest.approx(handle.buffer_bytes, rel=0.01)
    handle.disable()
    assert decoder.layers[0].q.base.weight.device.type == "cuda"


@pytest.mark.parametrize("save", [None, "boundary", "attention", "all"])
def test_quantised_weights(decoder, toys, save):
    """NF4: the same bits as with the dequantised weights, streamed or not, and in bf16."""
    pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (rlx[nf4])")
    model = copy.deepcopy(decoder)
    quantize_layers(model)
    for full, small in zip(decoder.layers.modules(), model.layers.modules(), strict=True):
        if isinstance(small, NF4Linear):
            full.weight.data = dequantized(small.weight, torch.bfloat16)
    streamed = copy.deepcopy(model)
    handle = enable_layer_offloading(streamed)
    for each in (model, streamed):
        if save is not None:
            enable_activation_offloading(each, save != "all", OffloadOptions(save=save, min_bytes=0))
    for _ in range(2):
        expected = toys.grade(decoder, read)
        torch.cuda.synchronize()
        expected.assert_equal(toys.grade(model, read))
        expected.assert_equal(toys.grade(streamed, read))
    # Two fetches of a layer in each of two steps; both ends are still there when the direction turns.
    assert 3 * handle.streamed_bytes < handle.stats().copied_bytes <= 4 * handle.streamed_bytes


def _share(rank, address, queue):
    """Compute with frozen weights of the first process, streamed from the copy that both map."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(rank)  # the second one's own values go
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).requires_grad_(False)
    handle = enable_layer_offloading(model, [*model], device=torch.device("cuda", 0), group=dist.group.WORLD)
    x = torch.ones(8, WIDTH, device="cuda", requires_grad=True)
    model(x).sum().backward()
    torch.cuda.synchronize()
    handle.release()  # the first two layers are still on the device
    queue.put((rank, x.grad.cpu().numpy(), model[0].weight.is_pinned(), handle.stats().copied_bytes))
    dist.barrier()
    dist.destroy_process_group()


def test_processes_share_one_copy(tmp_path):
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = mp.start_processes(_share, (f"file://{tmp_path / 'store'}", queue), 2, join=False, start_method="spawn")
    (_, first, *_), (_, second, *_) = found = sorted((queue.get() for _ in range(2)), key=lambda each: each[0])
    while not processes.join():
        pass
    assert (first == second).all()
    assert all(is_pinned and copied_bytes > 0 for *_, is_pinned, copied_bytes in found)
